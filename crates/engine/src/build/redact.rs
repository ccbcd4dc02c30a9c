//! What a build takes over from this host may hold passwords: of a proxy, a mirror, a registry. Steps see
//! them; nobody reads them in what steps say. Pure.

const MASK: &str = "***";

// Shorter ones are more often part of a word than anybody's secret.
const SHORTEST: usize = 4;

// npm's settings that are secrets, whatever registry they are for.
const NPM_SECRETS: [&str; 3] = ["_authtoken", "_password", "_auth"];

/// The secrets of one build.
#[derive(Debug, Default, Clone)]
pub(crate) struct Redaction(Vec<String>);

impl Redaction {
    /// Notes what is secret in a setting: a login in a URL.
    pub(crate) fn learn(&mut self, text: &str) {
        for (start, end) in logins(text) {
            let login = &text[start..end];
            self.note(login.split_once(':').map_or(login, |(_, password)| password));
        }
    }

    /// Notes what is secret in the lines of an npm configuration.
    pub(crate) fn learn_npm(&mut self, text: &str) {
        for line in text.lines() {
            if let Some((key, value)) = line.split_once('=')
                && NPM_SECRETS.iter().any(|secret| key.trim().to_ascii_lowercase().ends_with(secret))
            {
                self.note(value.trim().trim_matches('"'));
            }
            self.learn(line);
        }
    }

    fn note(&mut self, secret: &str) {
        if secret.len() >= SHORTEST && !self.0.iter().any(|known| known == secret) {
            self.0.push(secret.to_owned());
            // The longest first, so that none is left half-covered by a shorter one in it.
            self.0.sort_by_key(|known| std::cmp::Reverse(known.len()));
        }
    }

    /// A line without the secrets, and without the login of any URL.
    pub(crate) fn line(&self, text: &str) -> String {
        let covered = self.0.iter().fold(text.to_owned(), |line, secret| line.replace(secret, MASK));
        without_logins(&covered, MASK)
    }
}

/// A text in which every URL has lost its login, `mask` in its place.
pub(crate) fn without_logins(text: &str, mask: &str) -> String {
    let mut rest = text.to_owned();
    for (start, end) in logins(text).into_iter().rev() {
        match mask {
            "" => rest.replace_range(start..=end, ""),
            _ => rest.replace_range(start..end, mask),
        }
    }
    rest
}

// Where `user:password` of `scheme://user:password@host` begins and ends.
fn logins(text: &str) -> Vec<(usize, usize)> {
    let ends = |byte: u8| byte.is_ascii_whitespace() || matches!(byte, b'/' | b'"' | b'\'' | b'?' | b'#');
    text.match_indices("://")
        .filter_map(|(at, mark)| {
            let start = at + mark.len();
            let length =
                text.as_bytes()[start..].iter().position(|byte| ends(*byte)).unwrap_or(text.len() - start);
            let at = text[start..start + length].rfind('@').filter(|at| *at > 0)?;
            Some((start, start + at))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_says_names_no_password_of_the_host() {
        let mut redaction = Redaction::default();
        redaction.learn("http://user:pass@word@proxy.test:3128");
        redaction.learn_npm(
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
            assert_eq!(redaction.line(said), shown);
        }
        assert_eq!(without_logins("URIs: http://a:b@m.test/debian", ""), "URIs: http://m.test/debian");
    }
}
