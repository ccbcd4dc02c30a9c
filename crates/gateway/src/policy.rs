//! Which names a sandbox may reach. Pure: looks nothing up, connects to nothing.
//!
//! | entry of the policy | stands for |
//! |---|---|
//! | `example.org` | that name only |
//! | `*.example.org` | every name below it, at any depth, and not `example.org` itself |
//! | `*`, an address, anything malformed | nothing |
//!
//! Upper case and one final dot make no difference. Names outside ASCII are compared in their
//! `xn--` form. An address literal is never a name, in none of the spellings resolvers accept.

use crate::ledger::Policy;

/// The ports a policy opens for its names: plain HTTP and TLS, the two whose first bytes say which
/// name is meant.
pub const PORTS: [u16; 2] = [80, 443];

// The gateway's own names live below this one, so no policy may send it elsewhere.
const OWN_DOMAIN: &str = "harvest.internal";

// RFC 1035, 2.3.4.
const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

/// Whether the policy lets a sandbox connect to this name and port.
#[must_use]
pub fn allows(policy: &Policy, name: &str, port: u16) -> bool {
    PORTS.contains(&port) && allows_name(policy, name)
}

/// Whether the policy lets a sandbox look this name up.
#[must_use]
pub fn allows_name(policy: &Policy, name: &str) -> bool {
    let Policy::Trusted(entries) = policy else { return false };
    let Some(name) = normal(name) else { return false };
    if below(&name, OWN_DOMAIN) || name == OWN_DOMAIN {
        return false;
    }
    entries.iter().any(|entry| matches(entry, &name))
}

/// The one spelling of a name that is compared: lower case, ASCII, no final dot. `None` when the
/// text is not a host name, or is an address.
#[must_use]
pub fn normal(name: &str) -> Option<String> {
    let name = name.strip_suffix('.').unwrap_or(name);
    let name = if name.is_ascii() { name.to_ascii_lowercase() } else { ascii_form(name)? };
    let labels_are_sound = name.split('.').all(label_is_sound);
    (labels_are_sound && name.len() <= MAX_NAME_BYTES && !ends_in_a_number(&name)).then_some(name)
}

fn matches(entry: &str, name: &str) -> bool {
    match entry.strip_prefix("*.") {
        Some(parent) => normal(parent).is_some_and(|parent| below(name, &parent)),
        None => normal(entry).is_some_and(|entry| entry == name),
    }
}

fn below(name: &str, parent: &str) -> bool {
    name.strip_suffix(parent).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

fn label_is_sound(label: &str) -> bool {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=MAX_LABEL_BYTES).contains(&label.len())
        && label.bytes().all(sound)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

// Resolvers read `127.1`, `2130706433` and `0x7f.0.0.1` as addresses. No top-level domain is a
// number, so a name whose last label looks like one is an address or nonsense.
fn ends_in_a_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let hex = last
        .strip_prefix("0x")
        .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hex || last.bytes().all(|byte| byte.is_ascii_digit())
}

fn ascii_form(name: &str) -> Option<String> {
    // Only letters, digits, dots and hyphens may go in: anything else could mean another part of a URL.
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

    fn trusted(entries: &[&str]) -> Policy {
        Policy::Trusted(entries.iter().map(|entry| (*entry).to_owned()).collect())
    }

    #[test]
    fn a_name_is_allowed_on_the_two_web_ports_only() {
        let policy = trusted(&["example.org"]);
        assert!(allows(&policy, "example.org", 80) && allows(&policy, "example.org", 443));
        assert!(!allows(&policy, "example.org", 22) && !allows(&policy, "example.org", 0));
    }

    #[test]
    fn a_wildcard_covers_every_depth_but_not_its_own_root() {
        let policy = trusted(&["*.example.org"]);
        assert!(allows_name(&policy, "a.example.org") && allows_name(&policy, "a.b.example.org"));
        assert!(!allows_name(&policy, "example.org"));
        assert!(!allows_name(&policy, "badexample.org"));
        assert!(!allows_name(&policy, "a.example.org.evil.net"));
    }

    #[test]
    fn a_lone_star_or_a_star_elsewhere_stands_for_nothing() {
        for entry in ["*", "*.", "ex*.org", "a.*.org", "", ".", ".."] {
            assert!(!allows_name(&trusted(&[entry]), "example.org"), "{entry}");
            assert!(!allows_name(&trusted(&[entry]), "a.b.org"), "{entry}");
        }
    }

    #[test]
    fn case_and_a_final_dot_make_no_difference_and_idn_is_compared_in_ascii() {
        let policy = trusted(&["Example.ORG.", "bücher.example"]);
        assert!(allows_name(&policy, "eXample.org."));
        assert!(!allows_name(&policy, "example.org.."));
        assert!(
            allows_name(&policy, "xn--bcher-kva.example") && allows_name(&policy, "BÜCHER.example")
        );
    }

    #[test]
    fn an_address_is_never_a_name_even_when_the_policy_lists_it() {
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
    fn the_gateways_own_names_are_never_sent_elsewhere() {
        assert!(!allows_name(
            &trusted(&["*.internal", "git.harvest.internal"]),
            "git.harvest.internal"
        ));
    }

    #[test]
    fn an_empty_policy_allows_nothing() {
        assert!(!allows(&Policy::None, "example.org", 443));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_what_is_normal_stays_so(text in "\\PC{0,80}") {
            if let Some(name) = normal(&text) {
                prop_assert_eq!(normal(&name), Some(name.clone()));
                prop_assert!(name.parse::<std::net::IpAddr>().is_err());
            }
        }

        #[test]
        fn only_names_below_the_wildcard_pass(name in "[a-z0-9.*-]{1,40}") {
            if allows_name(&trusted(&["*.example.org"]), &name) {
                prop_assert!(name.trim_end_matches('.').ends_with(".example.org"));
            }
        }

        #[test]
        fn an_entry_allows_exactly_itself(entry in "[a-z]{1,10}\\.[a-z]{2,5}", other in "[a-z]{1,10}\\.[a-z]{2,5}") {
            prop_assert_eq!(allows_name(&trusted(&[&entry]), &other), entry == other);
        }
    }
}
