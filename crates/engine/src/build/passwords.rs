//! What a build takes over from this host may hold passwords: of a proxy, a mirror, a registry. Steps see
//! them; nobody reads them in what steps say. Finds them; pure.

use harvest_proto::redact::{Redaction, logins};

// npm's settings that are secrets, whatever registry they are for.
const NPM_SECRETS: [&str; 3] = ["_authtoken", "_password", "_auth"];

/// Notes what is secret in a setting: a login in a URL.
pub(super) fn learn(known: &mut Redaction, text: &str) {
    for login in logins(text) {
        let login = &text[login];
        known.learn(login.split_once(':').map_or(login, |(_, password)| password));
    }
}

/// Notes what is secret in the lines of an npm configuration.
pub(super) fn learn_npm(known: &mut Redaction, text: &str) {
    for line in text.lines() {
        if let Some((key, value)) = line.split_once('=')
            && NPM_SECRETS.iter().any(|secret| key.trim().to_ascii_lowercase().ends_with(secret))
        {
            known.learn(value.trim().trim_matches('"'));
        }
        learn(known, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_says_names_no_password_of_the_host() {
        let mut known = Redaction::new();
        learn(&mut known, "http://user:pass@word@proxy.test:3128");
        learn_npm(
            &mut known,
            "//r.test/:_authToken=npm_secret\n_auth = \"dXNlcjp4\"\nregistry=https://a:hidden@r.test/\n",
        );
        for (said, shown) in [
            ("via http://user:pass@word@proxy.test:3128/x", "via http://***@proxy.test:3128/x"),
            ("token npm_secret, dXNlcjp4", "token ***, ***"),
            ("the word is hidden", "the word is ***"),
            (
                "git clone https://x:unknown@g.test/a https://g.test/b@2",
                "git clone https://***@g.test/a https://g.test/b@2",
            ),
            ("mail a@b.test", "mail a@b.test"),
        ] {
            assert_eq!(known.cover(said), shown);
        }
    }
}
