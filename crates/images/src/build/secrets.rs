//! Finds the passwords in the host's settings: of proxies, mirrors and registries. Build steps get
//! them, and their output must not show them. Pure.

use harvest_proto::redact::{Redactor, url_logins};

// Suffixes of npm's secret settings; a registry's URL precedes them.
const NPM_SECRETS: [&str; 3] = ["_authtoken", "_password", "_auth"];

/// Adds the passwords of the URLs in a setting.
pub(super) fn add_url_passwords(redactor: &mut Redactor, text: &str) {
    for login in url_logins(text) {
        let login = &text[login];
        redactor.add(login.split_once(':').map_or(login, |(_, password)| password));
    }
}

/// Adds the secrets of an npm configuration.
pub(super) fn add_npm_secrets(redactor: &mut Redactor, text: &str) {
    for line in text.lines() {
        if let Some((key, value)) = line.split_once('=')
            && NPM_SECRETS.iter().any(|secret| key.trim().to_ascii_lowercase().ends_with(secret))
        {
            redactor.add(value.trim().trim_matches('"'));
        }
        add_url_passwords(redactor, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_passwords_are_masked_in_output() {
        let mut redactor = Redactor::new();
        add_url_passwords(&mut redactor, "http://user:pass@word@proxy.test:3128");
        add_npm_secrets(
            &mut redactor,
            "//r.test/:_authToken=npm_secret\n_auth = \"dXNlcjp4\"\nregistry=https://a:hidden@r.test/\n",
        );
        for (output, shown) in [
            ("via http://user:pass@word@proxy.test:3128/x", "via http://***@proxy.test:3128/x"),
            ("token npm_secret, dXNlcjp4", "token ***, ***"),
            ("the word is hidden", "the word is ***"),
            (
                "git clone https://x:unknown@g.test/a https://g.test/b@2",
                "git clone https://***@g.test/a https://g.test/b@2",
            ),
            ("mail a@b.test", "mail a@b.test"),
        ] {
            assert_eq!(redactor.redact(output), shown);
        }
    }
}
