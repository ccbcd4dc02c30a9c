//! Covers secrets in a line: those we were told of, and whatever has the shape of one. Rather too much
//! than too little. Pure.

const MASK: &str = "***";

// Shorter ones are more often part of a word than anybody's secret.
const SHORTEST: usize = 4;

// Of a secret of several lines, such as a key, each line that cannot be guessed.
const SHORTEST_LINE: usize = 16;

// Ours, and those of the services that coding agents meet. What follows must be as long as a secret.
const PREFIXES: [&str; 13] = [
    "hv_",
    "hvt_",
    "sk-",
    "ghp_",
    "gho_",
    "ghs_",
    "ghu_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "npm_",
    "pypi-",
];
const SHORTEST_PREFIXED: usize = 16;

// What stands behind these is a secret wherever it is; compared without regard to case.
const MARKS: [&str; 11] = [
    "bearer ",
    "authorization: basic ",
    "authorization\": \"basic ",
    "authorization\":\"basic ",
    "authorization=basic ",
    "x-api-key: ",
    "x-api-key\": \"",
    "password=",
    "secret=",
    "token=",
    "api_key=",
];

/// What is to be covered.
#[derive(Debug)]
pub(crate) struct Redaction(Vec<String>);

impl Redaction {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Notes a value, also as it looks inside a quoted text.
    pub(crate) fn learn(&mut self, secret: &str) {
        let quoted = serde_json::to_string(secret).unwrap_or_default();
        let quoted = quoted.trim_matches('"').to_owned();
        let lines = secret.lines().map(str::trim);
        let lines = lines.filter(|line| line.len() >= SHORTEST_LINE && !line.starts_with("-----"));
        for value in [secret.trim().to_owned(), quoted].into_iter().chain(lines.map(str::to_owned)) {
            if value.len() >= SHORTEST && !self.0.contains(&value) {
                self.0.push(value);
            }
        }
        // The longest first, so that none is left half-covered by a shorter one in it.
        self.0.sort_by_key(|known| std::cmp::Reverse(known.len()));
    }

    /// The text without secrets.
    pub(crate) fn cover(&self, text: &str) -> String {
        let known =
            self.0.iter().fold(text.to_owned(), |line, secret| match line.contains(secret.as_str()) {
                true => line.replace(secret.as_str(), MASK),
                false => line,
            });
        shapes(&logins(&known))
    }
}

/// Covers what stands behind a mark or a prefix.
fn shapes(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let begins = at == 0 || !text.as_bytes()[at - 1].is_ascii_alphanumeric();
        if let Some((skip, length)) = begins.then(|| shape(&text[at..], &lower[at..])).flatten() {
            out += &text[at..at + skip];
            out += MASK;
            at += skip + length;
            continue;
        }
        let next = text[at..].chars().next().map_or(1, char::len_utf8);
        out += &text[at..at + next];
        at += next;
    }
    out
}

/// What of a secret's shape this begins with may be shown, and how long the rest is.
fn shape(text: &str, lower: &str) -> Option<(usize, usize)> {
    let mark = MARKS.iter().find(|mark| lower.starts_with(**mark)).map(|mark| (mark.len(), 1));
    let prefix = || PREFIXES.iter().find(|prefix| text.starts_with(**prefix));
    let (skip, shortest) = mark.or_else(|| Some((prefix()?.len(), SHORTEST_PREFIXED)))?;
    let length = value_length(&text[skip..]);
    (length >= shortest).then_some((skip, length))
}

/// How far a token goes.
fn value_length(text: &str) -> usize {
    let part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=%".contains(&byte);
    text.bytes().position(|byte| !part(byte)).unwrap_or(text.len())
}

/// Covers the login of every URL.
fn logins(text: &str) -> String {
    let mut parts = text.split("://");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let ends = |letter: char| letter.is_whitespace() || "/\"'?#\\<>".contains(letter);
        let authority = part.find(ends).map_or(part, |end| &part[..end]);
        out += "://";
        match authority.rfind('@').filter(|at| *at > 0) {
            Some(at) => {
                out += MASK;
                out += &part[at..];
            }
            None => out += part,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_learnt_is_covered_in_every_form_it_is_printed_in() {
        let mut known = Redaction::new();
        known.learn("s3cret-value");
        known.learn("s3cret-value-that-is-longer");
        known.learn("two\"lines\nof-a-long-private-key");
        known.learn("abc");
        assert_eq!(known.cover("a s3cret-value-that-is-longer b s3cret-value"), "a *** b ***");
        for line in [
            "two\"lines\nof-a-long-private-key",
            r#"{"a":"two\"lines\nof-a-long-private-key"}"#,
            "of-a-long-private-key",
        ] {
            assert!(!known.cover(line).contains("private"), "{line}");
        }
        assert_eq!(known.cover("abc"), "abc");
    }

    #[test]
    fn what_looks_like_a_secret_is_covered() {
        let none = Redaction::new();
        for (line, clean) in [
            ("hvt_0123456789abcdef0123", "hvt_***"),
            ("key=sk-ant-api03-abcdefghijklmnop!", "key=sk-***!"),
            ("a ghp_ABCDEFGHIJKLMNOPqrst b", "a ghp_*** b"),
            ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
            ("authorization: basic eDp5", "authorization: basic ***"),
            (r#"{"authorization":"Basic eDp5"}"#, r#"{"authorization":"Basic ***"}"#),
            ("x-api-key: k", "x-api-key: ***"),
            ("https://me:pw@git.example/x and http://a@b", "https://***@git.example/x and http://***@b"),
            ("GET /x?token=abc&y=1", "GET /x?token=***&y=1"),
            ("äöü Bearer ü", "äöü Bearer ü"),
        ] {
            assert_eq!(none.cover(line), clean);
        }
    }

    #[test]
    fn ordinary_lines_stay_as_they_are() {
        let none = Redaction::new();
        for line in [
            "listening address=127.0.0.1:7070",
            "risk-of-something-longer-than-that",
            "ses_4kq2aaaaaaaa npm_config http://127.0.0.1:7070/v1/sessions?limit=2 a@b",
            "basic research of bearers",
        ] {
            assert_eq!(none.cover(line), line);
        }
    }
}
