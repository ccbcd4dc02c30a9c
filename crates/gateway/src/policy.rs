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

use harvest_proto::{NetworkPolicy, RuleScope, RuleVerdict, api::NetworkRule};

use crate::ledger::ResolvedPolicy;

/// Ports for allowed names: plain HTTP and TLS, whose first bytes contain the host name.
const PORTS: [u16; 2] = [80, 443];

// Reserved for the gateway's own names; no policy can redirect them.
const OWN_DOMAIN: &str = "harvest.internal";

// RFC 1035, 2.3.4.
const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

/// What a policy says about a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed {
        /// Whether the name may have a private address.
        private: bool,
    },
    Refused {
        reason: String,
        /// How to allow it; `None` for what is not a host name.
        hint: Option<String>,
    },
}

/// Judges a connection. A rule that denies wins; then a rule that allows; then the base.
#[must_use]
pub(crate) fn judge(policy: &ResolvedPolicy, name: &str, port: u16) -> Verdict {
    match normalize(name).filter(|name| !is_own_name(name)) {
        Some(host) => judge_by(policy, &rules_of(policy, &host), &host, port),
        None => Verdict::Refused { reason: policy.refusal(), hint: None },
    }
}

/// The rules for a normalized name, on any port.
fn rules_of<'a>(policy: &'a ResolvedPolicy, name: &str) -> Vec<&'a NetworkRule> {
    policy.rules.iter().filter(|rule| covers(&rule.name, name)).collect()
}

fn judge_by(policy: &ResolvedPolicy, rules: &[&NetworkRule], name: &str, port: u16) -> Verdict {
    let on_port = |rule: &&&NetworkRule| rule.ports.is_empty() || rule.ports.contains(&port);
    let mut allowing = Vec::new();
    for rule in rules.iter().filter(on_port) {
        match rule.verdict {
            RuleVerdict::Deny => return policy.denied_by(rule),
            RuleVerdict::Allow => allowing.push(rule),
        }
    }
    if !allowing.is_empty() {
        return Verdict::Allowed { private: allowing.iter().any(|rule| rule.private) };
    }
    match base_allows(policy, name) {
        Some(base) if PORTS.contains(&port) || base.ports.contains(&port) => {
            Verdict::Allowed { private: base.private }
        }
        Some(_) => Verdict::Refused {
            reason: format!("port {port} is not allowed, only 80 and 443"),
            hint: policy.hint(name, port),
        },
        None => Verdict::Refused { reason: policy.refusal(), hint: policy.hint(name, port) },
    }
}

#[must_use]
pub(crate) fn allows(policy: &ResolvedPolicy, name: &str, port: u16) -> bool {
    matches!(judge(policy, name, port), Verdict::Allowed { .. })
}

/// Whether a connection to the name is allowed on some port.
#[must_use]
pub(crate) fn allows_name(policy: &ResolvedPolicy, name: &str) -> bool {
    let Some(name) = normalize(name).filter(|name| !is_own_name(name)) else { return false };
    let rules = rules_of(policy, &name);
    let of_base = base_allows(policy, &name).map_or(&[][..], |base| base.ports);
    let of_rules = rules.iter().flat_map(|rule| &rule.ports);
    let mut ports = PORTS.iter().chain(of_base).chain(of_rules);
    ports.any(|port| matches!(judge_by(policy, &rules, &name, *port), Verdict::Allowed { .. }))
}

/// What the base of a policy allows of a name, besides the usual ports.
#[derive(Clone, Copy)]
struct BaseAllows<'a> {
    ports: &'a [u16],
    private: bool,
}

fn base_allows<'a>(policy: &'a ResolvedPolicy, name: &str) -> Option<BaseAllows<'a>> {
    let trusted = policy.trusted.iter().find(|trusted| covers(&trusted.name, name));
    let of_trusted =
        trusted.map(|trusted| BaseAllows { ports: &trusted.ports, private: trusted.private });
    match policy.base {
        NetworkPolicy::None => None,
        NetworkPolicy::Trusted => of_trusted,
        NetworkPolicy::Full => {
            Some(of_trusted.unwrap_or(BaseAllows { ports: &[], private: false }))
        }
    }
}

/// Judges a fetch from a public git host at the git door: every policy but `none` allows it, unless
/// a rule denies the host.
#[must_use]
pub(crate) fn judge_public_git(policy: &ResolvedPolicy, host: &str) -> Verdict {
    match (judge(policy, host, 443), policy.base) {
        (allowed @ Verdict::Allowed { .. }, _) => allowed,
        (refused, NetworkPolicy::None) => refused,
        (refused, _) => {
            let is_denied = |rule: &&NetworkRule| rule.verdict == RuleVerdict::Deny;
            match rules_of(policy, host).iter().any(is_denied) {
                true => refused,
                false => Verdict::Allowed { private: false },
            }
        }
    }
}

/// Whether a normalized name is reserved for the gateway.
pub(crate) fn is_own_name(name: &str) -> bool {
    is_below(name, OWN_DOMAIN) || name == OWN_DOMAIN
}

impl ResolvedPolicy {
    /// Whether a sandbox may connect to a name, or to names below `*.NAME`, on all these ports.
    #[must_use]
    pub fn allows(&self, entry: &str, ports: &[u16]) -> bool {
        let name = match entry.strip_prefix("*.") {
            Some(rest) => format!("any.{rest}"),
            None => entry.to_owned(),
        };
        ports.iter().all(|port| allows(self, &name, *port))
    }

    /// The reason for refusing a name.
    pub(crate) fn refusal(&self) -> String {
        let whose = if self.owner.is_empty() { "sandbox" } else { "session" };
        format!("not allowed by this {whose}'s network policy (`{}`)", self.base)
    }

    /// The command that allows a name; `None` for what is not a host name.
    pub(crate) fn hint(&self, name: &str, port: u16) -> Option<String> {
        let name = normalize(name).filter(|name| name.contains('.'))?;
        if self.owner.is_empty() {
            return Some(format!("`--allow {}` allows it", target(&name, port)));
        }
        Some(format!("`harvest net allow {} {}` allows it", self.owner, target(&name, port)))
    }

    fn denied_by(&self, rule: &NetworkRule) -> Verdict {
        let (of, hint) = match rule.scope {
            RuleScope::Session => (
                "this session",
                format!("`harvest net rm {} '{}'` removes the rule", self.owner, rule.name),
            ),
            RuleScope::Repository => ("the repository", self.admins_hint()),
            RuleScope::Everywhere => ("this server", self.admins_hint()),
        };
        let reason = format!("denied by the rule `{}` of {of}", rule.name);
        Verdict::Refused { reason, hint: Some(hint) }
    }

    fn admins_hint(&self) -> String {
        format!("`harvest net ls {}` lists the rules; an admin can remove it", self.owner)
    }
}

/// How an admin allows a name that has a private address.
pub(crate) fn private_hint(name: &str, port: u16) -> String {
    format!(
        "an admin can allow it: `harvest net allow --everywhere --private {}`",
        target(name, port)
    )
}

/// A name and a port as `harvest net` takes them.
fn target(name: &str, port: u16) -> String {
    if PORTS.contains(&port) { name.to_owned() } else { format!("{name}:{port}") }
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
pub fn normalize_entry(entry: &str) -> Option<String> {
    match entry.strip_prefix("*.") {
        Some(parent) => normalize(parent).map(|parent| format!("*.{parent}")),
        None => normalize(entry),
    }
}

/// Whether an entry matches a normalized name.
pub(crate) fn matches(entry: &str, name: &str) -> bool {
    normalize_entry(entry).is_some_and(|entry| covers(&entry, name))
}

/// Whether a normalized entry matches a normalized name.
fn covers(entry: &str, name: &str) -> bool {
    match entry.strip_prefix("*.") {
        Some(parent) => is_below(name, parent),
        None => entry == name,
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
    use crate::ledger::TrustedName;

    fn trusted(entries: &[&str]) -> ResolvedPolicy {
        ResolvedPolicy::of(NetworkPolicy::Trusted, entries)
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

    fn rule(verdict: RuleVerdict, name: &str, ports: &[u16], scope: RuleScope) -> NetworkRule {
        let (name, ports) = (name.to_owned(), ports.to_vec());
        NetworkRule { name, verdict, ports, private: false, scope }
    }

    fn with_rules(base: NetworkPolicy, rules: Vec<NetworkRule>) -> ResolvedPolicy {
        ResolvedPolicy { rules, ..ResolvedPolicy::of(base, &["example.org"]) }
    }

    #[test]
    fn rule_that_denies_wins_over_every_scope() {
        for deny in RuleScope::ALL {
            for allow in RuleScope::ALL {
                let rules = vec![
                    rule(RuleVerdict::Allow, "api.example.org", &[80, 443], *allow),
                    rule(RuleVerdict::Deny, "*.example.org", &[], *deny),
                ];
                for base in NetworkPolicy::ALL {
                    let policy = with_rules(*base, rules.clone());
                    assert!(!allows(&policy, "api.example.org", 443));
                    assert!(!allows_name(&policy, "api.example.org"));
                }
            }
        }
    }

    #[test]
    fn rule_allows_its_ports_only() {
        let ports = |ports| vec![rule(RuleVerdict::Allow, "db.net", ports, RuleScope::Session)];
        let policy = with_rules(NetworkPolicy::None, ports(&[5432]));
        assert!(allows(&policy, "db.net", 5432) && allows_name(&policy, "db.net"));
        assert!(!allows(&policy, "db.net", 443) && !allows(&policy, "example.org", 5432));
        let denied = rule(RuleVerdict::Deny, "example.org", &[80], RuleScope::Session);
        let policy = with_rules(NetworkPolicy::Trusted, vec![denied]);
        assert!(!allows(&policy, "example.org", 80) && allows(&policy, "example.org", 443));
    }

    #[test]
    fn private_address_needs_a_rule_that_says_so() {
        let private = |name, private| {
            let allow = rule(RuleVerdict::Allow, name, &[443], RuleScope::Everywhere);
            let rules = vec![NetworkRule { private, ..allow }];
            judge(&with_rules(NetworkPolicy::Full, rules), "git.corp.net", 443)
        };
        let allowed = |private| Verdict::Allowed { private };
        assert_eq!(private("git.corp.net", true), allowed(true));
        assert_eq!(private("git.corp.net", false), allowed(false));
        assert_eq!(private("other.net", true), allowed(false));
    }

    #[test]
    fn mirror_of_the_host_may_be_private() {
        let mirror =
            TrustedName { name: "npm.corp.net".to_owned(), ports: vec![8443], private: true };
        for base in [NetworkPolicy::Trusted, NetworkPolicy::Full] {
            let trusted = [mirror.clone()].into();
            let policy = ResolvedPolicy { trusted, ..with_rules(base, Vec::new()) };
            for port in [443, 8443] {
                let verdict = judge(&policy, "npm.corp.net", port);
                assert_eq!(verdict, Verdict::Allowed { private: true }, "{port}");
            }
            assert!(!allows(&policy, "npm.corp.net", 8080));
            assert_ne!(judge(&policy, "a.net", 443), Verdict::Allowed { private: true });
        }
    }

    #[test]
    fn public_git_follows_base_and_rules() {
        let judged = |base, rules| judge_public_git(&with_rules(base, rules), "github.com");
        let allowed = |verdict| matches!(verdict, Verdict::Allowed { .. });
        assert!(allowed(judged(NetworkPolicy::Trusted, Vec::new())));
        assert!(allowed(judged(NetworkPolicy::Full, Vec::new())));
        assert!(!allowed(judged(NetworkPolicy::None, Vec::new())));
        let rule = |verdict| vec![rule(verdict, "github.com", &[443], RuleScope::Session)];
        assert!(allowed(judged(NetworkPolicy::None, rule(RuleVerdict::Allow))));
        for base in NetworkPolicy::ALL {
            assert!(!allowed(judged(*base, rule(RuleVerdict::Deny))), "{base}");
        }
    }

    #[test]
    fn full_allows_every_name_on_web_ports() {
        let policy = with_rules(NetworkPolicy::Full, Vec::new());
        assert!(allows(&policy, "anything.net", 443) && !allows(&policy, "anything.net", 22));
        assert!(
            !allows_name(&policy, "127.0.0.1") && !allows_name(&policy, "git.harvest.internal")
        );
    }

    #[test]
    fn refusal_names_the_command_that_allows_it() {
        let hint = |policy: &ResolvedPolicy, name, port| match judge(policy, name, port) {
            Verdict::Refused { hint, .. } => hint.unwrap_or_default(),
            Verdict::Allowed { .. } => panic!("{name} is allowed"),
        };
        let mut policy = trusted(&["example.org"]);
        policy.owner = "ses_1".to_owned();
        let allow = |name: &str| format!("`harvest net allow ses_1 {name}` allows it");
        assert_eq!(hint(&policy, "GitHub.com.", 443), allow("github.com"));
        assert_eq!(hint(&policy, "github.com", 22), allow("github.com:22"));
        assert_eq!(hint(&policy, "example.org", 22), allow("example.org:22"));
        for nothing in ["127.0.0.1", "x\" = 1", "printer", "", "git.harvest.internal"] {
            assert_eq!(hint(&policy, nothing, 443), "", "{nothing}");
        }
        policy.rules = vec![rule(RuleVerdict::Deny, "*.net", &[], RuleScope::Session)];
        assert_eq!(hint(&policy, "a.net", 443), "`harvest net rm ses_1 '*.net'` removes the rule");
    }

    #[test]
    fn policy_none_allows_nothing() {
        assert!(!allows(&ResolvedPolicy::of(NetworkPolicy::None, &[]), "example.org", 443));
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
