//! Covers what looks like a secret in words that are kept or shown: a program's last lines, a log. It knows
//! shapes, not secrets: it is a net, not a promise, and rather takes too much than too little. Pure.

mod known;

use std::ops::Range;

pub use known::Redaction;

/// What stands where a secret stood.
pub const MASK: &str = "***";

/// Names whose values are nobody's business, in lower case and without separators.
const NAMES: [&str; 11] = [
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "accesskey",
    "privatekey",
    "credential",
    "credentials",
    "authorization",
];

/// What tokens begin with: ours, and those of the services that coding agents meet.
const PREFIXES: [&str; 15] = [
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
    "xoxp-",
    "AKIA",
    "npm_",
    "pypi-",
];

// Shorter words with such a beginning are words.
const SHORTEST_TOKEN: usize = 16;

/// How a credential may be introduced where its name has been said.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];

/// The same without what looks like a secret. Lines stay lines.
#[must_use]
pub fn cover(text: &str) -> String {
    text.split('\n').map(|line| shapes(&replace_logins(line, MASK))).collect::<Vec<_>>().join("\n")
}

/// A text in which no URL has a login any more.
#[must_use]
pub fn without_logins(text: &str) -> String {
    replace_logins(text, "")
}

/// The logins of all URLs in a text: `user:password` of `scheme://user:password@host`.
pub fn logins(text: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    let ends = |letter: char| letter.is_whitespace() || "/\"'?#".contains(letter);
    text.match_indices("://").filter_map(move |(at, mark)| {
        let start = at + mark.len();
        let rest = &text[start..];
        let authority = rest.find(ends).map_or(rest, |end| &rest[..end]);
        let length = authority.rfind('@').filter(|length| *length > 0)?;
        Some(start..start + length)
    })
}

/// With nothing to put in its place, the sign behind a login goes as well.
fn replace_logins(text: &str, mask: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    for login in logins(text) {
        out += &text[from..login.start];
        out += mask;
        from = login.end + usize::from(mask.is_empty());
    }
    out + &text[from..]
}

/// Covers tokens, and what stands behind a telling name, in one line.
fn shapes(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut at = 0;
    while let Some(letter) = line[at..].chars().next() {
        if let Some(secret) = secret_at(line, at) {
            out += &line[at..secret.start];
            out += MASK;
            at = secret.end;
        } else {
            out.push(letter);
            at += letter.len_utf8();
        }
    }
    out
}

/// Where the secret is that this begins with, or its name.
fn secret_at(line: &str, at: usize) -> Option<Range<usize>> {
    let before = line[..at].chars().next_back();
    if before.is_some_and(|letter| letter.is_ascii_alphanumeric()) {
        return None;
    }
    let rest = &line[at..];
    let found = prefixed(rest).or_else(|| borne(rest));
    let found =
        found.or_else(|| if before.is_some_and(is_name_letter) { None } else { pair(rest) })?;
    Some(at + found.start..at + found.end)
}

/// `ghp_…`: a token anybody knows by its beginning, which may be shown.
fn prefixed(text: &str) -> Option<Range<usize>> {
    let prefix = PREFIXES.iter().find(|prefix| text.starts_with(**prefix))?;
    let rest = &text[prefix.len()..];
    // `npm_config_cache_max` is none: behind an underscore comes a long run without another.
    let apart = if prefix.ends_with('_') { "" } else { "-_" };
    let counts = |letter: char| letter.is_ascii_alphanumeric() || apart.contains(letter);
    let enough = length(rest, counts) >= SHORTEST_TOKEN;
    let whole = length(rest, |letter| letter.is_ascii_alphanumeric() || "-_".contains(letter));
    enough.then(|| prefix.len()..prefix.len() + whole)
}

/// `Bearer …`, without a name before it.
fn borne(text: &str) -> Option<Range<usize>> {
    // The other schemes are ordinary words.
    let skip = scheme(text)
        .filter(|_| text.get(..6).is_some_and(|word| word.eq_ignore_ascii_case("bearer")))?;
    let value = length(&text[skip..], |letter| {
        letter.is_ascii_alphanumeric() || "-._~+/=%".contains(letter)
    });
    (value > 0).then(|| skip..skip + value)
}

/// `password=…`, `"token": "…"`, `Authorization: Basic …`.
fn pair(text: &str) -> Option<Range<usize>> {
    let name = length(text, is_name_letter);
    if !is_name(&text[..name]) {
        return None;
    }
    let closed = text[name..].trim_start_matches(['\\', '"', '\'', '`', ']', ')']).trim_start();
    let begin = ["=>", ":=", "==", "=", ":"].iter().find_map(|sign| closed.strip_prefix(sign))?;
    // A path in a program, such as `token::Kind`.
    if begin.starts_with(':') {
        return None;
    }
    let value = begin.trim_start();
    let at = text.len() - value.len();
    inside(value).map(|found| at + found.start..at + found.end)
}

/// What of a value is secret: without its quotes, and without a scheme.
fn inside(value: &str) -> Option<Range<usize>> {
    let first = value.chars().next()?;
    let (open, close) = match first {
        '\\' if value[1..].starts_with(['"', '\'']) => (2, Some(&value[..2])),
        '"' | '\'' | '`' => (1, Some(&value[..1])),
        '[' => (1, Some("]")),
        '{' => (1, Some("}")),
        _ => (0, None),
    };
    let content = &value[open..];
    let skip = scheme(content).unwrap_or(0);
    let secret = &content[skip..];
    let bare = |letter: char| !letter.is_whitespace() && !"&\"'`".contains(letter);
    let end = close.map_or_else(|| length(secret, bare), |close| until(secret, close));
    (end > 0).then(|| open + skip..open + skip + end)
}

/// As far as the closing sign; to the end where there is none.
fn until(text: &str, close: &str) -> usize {
    let mut at = 0;
    while let Some(letter) = text[at..].chars().next() {
        if text[at..].starts_with(close) {
            return at;
        }
        at += letter.len_utf8();
        // What is escaped closes nothing.
        if letter == '\\' && close.len() == 1 {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    at
}

/// How long a scheme and the space behind it are, if this begins with one.
fn scheme(text: &str) -> Option<usize> {
    let word = length(text, |letter| letter.is_ascii_alphabetic());
    let known = SCHEMES.iter().any(|scheme| text[..word].eq_ignore_ascii_case(scheme));
    let space = length(&text[word..], char::is_whitespace);
    (known && space > 0 && word + space < text.len()).then_some(word + space)
}

fn length(text: &str, part: impl Fn(char) -> bool) -> usize {
    text.find(|letter| !part(letter)).unwrap_or(text.len())
}

fn is_name_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "-_.".contains(letter)
}

fn is_name(word: &str) -> bool {
    let plain: String = word.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.to_ascii_lowercase();
    NAMES.iter().any(|name| plain.ends_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_looks_like_a_secret_is_masked_and_the_rest_stays() {
        for (said, told) in [
            (
                "cannot clone https://ada:s3cret@git.example/x.git",
                "cannot clone https://***@git.example/x.git",
            ),
            (
                "https://me:pw@git.example/x and http://a@b",
                "https://***@git.example/x and http://***@b",
            ),
            ("DB_PASSWORD=hunter2 ./run", "DB_PASSWORD=*** ./run"),
            ("api_key: abc123", "api_key: ***"),
            ("password:abc", "password:***"),
            ("db.password = 'a b'", "db.password = '***'"),
            (r#"{"user":"ada","token":"abc","n":1}"#, r#"{"user":"ada","token":"***","n":1}"#),
            (r#"{\"user\":\"ada\",\"token\":\"a\"}"#, r#"{\"user\":\"ada\",\"token\":\"***\"}"#),
            (r#"{"secret":"a\"b","n":1}"#, r#"{"secret":"***","n":1}"#),
            (r#"{"secret":["a","b"],"n":1}"#, r#"{"secret":[***],"n":1}"#),
            (r#"config["api-key"] = "k""#, r#"config["api-key"] = "***""#),
            ("GET /x?a=1&token=abc&y=1", "GET /x?a=1&token=***&y=1"),
            ("a=1&access_token=x&client_secret=y", "a=1&access_token=***&client_secret=***"),
            ("Authorization: Bearer eyJh.bGci_Oi", "Authorization: Bearer ***"),
            ("authorization: basic eDp5", "authorization: basic ***"),
            (r#"{"authorization":"Basic eDp5"}"#, r#"{"authorization":"Basic ***"}"#),
            ("sent bearer eyJhbGciOi, refused", "sent bearer ***, refused"),
            ("x-api-key: k", "x-api-key: ***"),
            ("using ghp_0123456789abcdefghij now", "using ghp_*** now"),
            ("github_pat_11AAAAAAA0123456789ab_rest", "github_pat_***"),
            ("key=sk-ant-api03-abcdefghijklmnop!", "key=sk-***!"),
        ] {
            assert_eq!(cover(said), told);
        }
    }

    #[test]
    fn a_login_is_found_with_its_signs_and_can_be_left_out() {
        let text = "URIs: http://a:p@ss@m.test/debian https://b@c/ http://d/e@f http://u:p<w>\\@g";
        let found: Vec<&str> = logins(text).map(|login| &text[login]).collect();
        assert_eq!(found, ["a:p@ss", "b", "u:p<w>\\"]);
        assert_eq!(
            without_logins(text),
            "URIs: http://m.test/debian https://c/ http://d/e@f http://g"
        );
    }

    #[test]
    fn ordinary_lines_stay_as_they_are() {
        for line in [
            "no tokens here: sk-y is a word",
            "make: *** [Makefile:3: all] Error 1",
            "see https://example.org/a@b and a=b",
            "listening address=127.0.0.1:7070",
            "risk-of-something-longer-than-that",
            "npm_config_cache_folder_name=/root",
            "ses_4kq2aaaaaaaa npm_config http://127.0.0.1:7070/v1/sessions?limit=2 a@b",
            "basic research of bearers",
            "use crate::token::Kind; // src/token.rs:12:5",
            "input_tokens=12 token:",
            "äöü Bearer ü",
        ] {
            assert_eq!(cover(line), line);
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic_and_lines_stay_lines(
            said in "(\\PC|[ \n=:@/\"\\\\\\[{]|token|bearer |://|ghp_){0,80}"
        ) {
            prop_assert_eq!(cover(&said).matches('\n').count(), said.matches('\n').count());
        }

        #[test]
        fn a_value_behind_such_a_name_is_never_told(value in "[a-zA-Z0-9]{8,30}", before in "[a-z]{1,5}") {
            for said in [
                format!("X_TOKEN={value}"),
                format!("password: {value}"),
                format!("h://u:{value}@x/y"),
                format!(r#"{{"{before}":"{before}","token":"{value}"}}"#),
                format!("?{before}={before}&token={value}"),
            ] {
                prop_assert!(!cover(&said).contains(&value), "{}", cover(&said));
            }
        }
    }
}
