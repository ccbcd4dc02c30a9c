//! Matching of host names against a network policy. Pure: no look-ups, no connections.
//!
//! | entry | matches |
//! |---|---|
//! | `example.org` | that name only |
//! | `*.example.org` | every name below it, at any depth, and not `example.org` itself |
//! | `*`, an address, anything malformed | nothing |
//!
//! Case and one trailing dot are ignored. Names outside ASCII are compared in their `xn--` form. An
//! address literal is never a name, in none of the spellings that resolvers accept.

use crate::ledger::ResolvedPolicy;

/// Ports for allowed names: plain HTTP and TLS, whose first bytes contain the host name.
const PORTS: [u16; 2] = [80, 443];

// Reserved for the gateway's own names; no policy can redirect them.
const OWN_DOMAIN: &str = "harvest.internal";

// RFC 1035, 2.3.4.
const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

#[must_use]
pub(crate) fn allows(policy: &ResolvedPolicy, name: &str, port: u16) -> bool {
    PORTS.contains(&port) && allows_name(policy, name)
}

#[must_use]
pub(crate) fn allows_name(policy: &ResolvedPolicy, name: &str) -> bool {
    let ResolvedPolicy::Trusted(entries) = policy else { return false };
    let Some(name) = normalize(name) else { return false };
    !is_own_name(&name) && entries.iter().any(|entry| matches(entry, &name))
}

/// Whether a normalized name is reserved for the gateway.
pub(crate) fn is_own_name(name: &str) -> bool {
    is_below(name, OWN_DOMAIN) || name == OWN_DOMAIN
}

impl ResolvedPolicy {
    /// The reason for refusing a name.
    pub(crate) fn refusal(&self) -> String {
        let name = match self {
            Self::None => "none",
            Self::Trusted(_) => "trusted",
        };
        format!("not allowed by this session's network policy (`{name}`)")
    }

    /// How to allow a name that this policy refuses; `None` for what is not a host name.
    pub(crate) fn hint(&self, name: &str) -> Option<String> {
        let name = normalize(name).filter(|name| name.contains('.'))?;
        Some(match self {
            Self::None => "a session started with `--net trusted` can reach the names that \
                           `harvest net ls` prints"
                .to_owned(),
            Self::Trusted(_) => format!(
                "to allow it, add \"{name}\" to the key `trusted` in harvest.toml and restart the \
                 server; `harvest net ls` prints what is allowed"
            ),
        })
    }
}

/// Normalizes a host name for comparison: lower case, ASCII, no trailing dot. `None` when the text
/// is not a host name, or is an address.
#[must_use]
pub(crate) fn normalize(name: &str) -> Option<String> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let name = if name.is_ascii() { name.to_ascii_lowercase() } else { ascii_form(name)? };
    let valid = name.split('.').all(is_valid_label);
    (valid && name.len() <= MAX_NAME_BYTES && !ends_in_a_number(&name)).then_some(name)
}

/// Normalizes an entry of a policy: a name, or `*.` and a name. `None` when it can match nothing.
#[must_use]
pub(crate) fn normalize_entry(entry: &str) -> Option<String> {
    match entry.strip_prefix("*.") {
        Some(parent) => normalize(parent).map(|parent| format!("*.{parent}")),
        None => normalize(entry),
    }
}

/// Whether an entry of a policy matches a normalized name.
pub(crate) fn matches(entry: &str, name: &str) -> bool {
    match entry.strip_prefix("*.") {
        Some(parent) => normalize(parent).is_some_and(|parent| is_below(name, &parent)),
        None => normalize(entry).is_some_and(|entry| entry == name),
    }
}

fn is_below(name: &str, parent: &str) -> bool {
    name.strip_suffix(parent).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

fn is_valid_label(label: &str) -> bool {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=MAX_LABEL_BYTES).contains(&label.len())
        && label.bytes().all(valid)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

// Resolvers read `127.1`, `2130706433` and `0x7f.0.0.1` as addresses. No top-level domain is a
// number, so a name whose last label looks like one is an address or invalid.
fn ends_in_a_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let hex = last
        .strip_prefix("0x")
        .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hex || last.bytes().all(|byte| byte.is_ascii_digit())
}

fn ascii_form(name: &str) -> Option<String> {
    // Any other character could be read as another part of the URL.
    let plain = |c: char| !c.is_ascii() || c.is_ascii_alphanumeric() || c == '.' || c == '-';
    if !name.chars().all(plain) {
        return None;
    }
    let url = reqwest::Url::parse(&format!("http://{name}/")).ok()?;
    url.domain().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trusted(entries: &[&str]) -> ResolvedPolicy {
        ResolvedPolicy::Trusted(entries.iter().map(|entry| (*entry).to_owned()).collect())
    }

    #[test]
    fn only_web_ports_are_allowed() {
        let policy = trusted(&["example.org"]);
        assert!(allows(&policy, "example.org", 80) && allows(&policy, "example.org", 443));
        assert!(!allows(&policy, "example.org", 22) && !allows(&policy, "example.org", 0));
    }

    #[test]
    fn wildcard_matches_any_depth_but_not_its_root() {
        let policy = trusted(&["*.example.org"]);
        assert!(allows_name(&policy, "a.example.org") && allows_name(&policy, "a.b.example.org"));
        assert!(!allows_name(&policy, "example.org"));
        assert!(!allows_name(&policy, "badexample.org"));
        assert!(!allows_name(&policy, "a.example.org.evil.net"));
    }

    #[test]
    fn other_uses_of_star_match_nothing() {
        for entry in ["*", "*.", "ex*.org", "a.*.org", "", ".", ".."] {
            assert!(!allows_name(&trusted(&[entry]), "example.org"), "{entry}");
            assert!(!allows_name(&trusted(&[entry]), "a.b.org"), "{entry}");
        }
    }

    #[test]
    fn names_are_compared_in_normal_form() {
        let policy = trusted(&["Example.ORG.", "bücher.example"]);
        assert!(allows_name(&policy, "eXample.org."));
        assert!(!allows_name(&policy, "example.org.."));
        assert!(
            allows_name(&policy, "xn--bcher-kva.example") && allows_name(&policy, "BÜCHER.example")
        );
    }

    #[test]
    fn address_is_never_allowed() {
        let literals = [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
            "0x7f000001",
            "::1",
            "[::1]",
            "1.2.3.0x",
            "１２７.0.0.1",
        ];
        for literal in literals {
            assert!(!allows_name(&trusted(&[literal]), literal), "{literal}");
        }
    }

    #[test]
    fn gateway_names_cannot_be_redirected() {
        assert!(!allows_name(
            &trusted(&["*.internal", "git.harvest.internal"]),
            "git.harvest.internal"
        ));
    }

    #[test]
    fn hint_says_how_to_allow_a_name() {
        let hint = trusted(&[]).hint("GitHub.com.").unwrap();
        assert!(hint.contains("add \"github.com\" to the key `trusted`"), "{hint}");
        assert!(ResolvedPolicy::None.hint("github.com").unwrap().contains("--net trusted"));
        for nothing in ["127.0.0.1", "x\" = 1", "printer", ""] {
            assert_eq!(trusted(&[]).hint(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn policy_none_allows_nothing() {
        assert!(!allows(&ResolvedPolicy::None, "example.org", 443));
    }

    proptest! {
        #[test]
        fn normalizing_is_idempotent(text in "\\PC{0,80}") {
            if let Some(name) = normalize(&text) {
                prop_assert_eq!(normalize(&name), Some(name.clone()));
                prop_assert!(name.parse::<std::net::IpAddr>().is_err());
            }
        }

        #[test]
        fn wildcard_matches_only_names_below_it(name in "[a-z0-9.*-]{1,40}") {
            if allows_name(&trusted(&["*.example.org"]), &name) {
                prop_assert!(name.trim_end_matches('.').ends_with(".example.org"));
            }
        }

        #[test]
        fn entry_matches_only_itself(
            entry in "[a-z]{1,10}\\.[a-z]{2,5}",
            other in "[a-z]{1,10}\\.[a-z]{2,5}",
        ) {
            prop_assert_eq!(allows_name(&trusted(&[&entry]), &other), entry == other);
        }
    }
}
