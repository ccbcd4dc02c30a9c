//! Replaces text that looks like a secret, in logs and program output. Pattern matching only: it
//! may miss secrets, and prefers false positives. Pure.

mod redactor;

use std::ops::Range;

pub use redactor::Redactor;

/// Replacement for a secret.
pub const MASK: &str = "***";

/// Names whose values are secret, in lower case and without separators.
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

/// Prefixes of tokens: Harvest's own, and those of services that coding agents use.
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

// Shorter words with such a prefix are usually not tokens.
const SHORTEST_TOKEN: usize = 16;

/// Authentication schemes that may precede a credential.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];

/// Replaces everything that looks like a secret. The number of lines does not change.
#[must_use]
pub fn redact(text: &str) -> String {
    text.split('\n')
        .map(|line| redact_patterns(&replace_logins(line, MASK)))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Removes the login from every URL in a text.
#[must_use]
pub fn strip_url_logins(text: &str) -> String {
    replace_logins(text, "")
}

/// Finds the logins of all URLs in a text: `user:password` of `scheme://user:password@host`.
pub fn url_logins(text: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    let ends = |letter: char| letter.is_whitespace() || "/\"'?#".contains(letter);
    text.match_indices("://").filter_map(move |(at, mark)| {
        let start = at + mark.len();
        let rest = &text[start..];
        let authority = rest.find(ends).map_or(rest, |end| &rest[..end]);
        let length = authority.rfind('@').filter(|length| *length > 0)?;
        Some(start..start + length)
    })
}

/// With an empty mask the `@` after the login is removed, too.
fn replace_logins(text: &str, mask: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    for login in url_logins(text) {
        out += &text[from..login.start];
        out += mask;
        from = login.end + usize::from(mask.is_empty());
    }
    out + &text[from..]
}

/// Masks tokens, and values after a secret name, in one line.
fn redact_patterns(line: &str) -> String {
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

/// The secret that starts at `at`, or whose name starts there.
fn secret_at(line: &str, at: usize) -> Option<Range<usize>> {
    let before = line[..at].chars().next_back();
    if before.is_some_and(|letter| letter.is_ascii_alphanumeric()) {
        return None;
    }
    let rest = &line[at..];
    let found = prefixed_token(rest).or_else(|| bearer_token(rest));
    let found = found
        .or_else(|| if before.is_some_and(is_name_letter) { None } else { named_value(rest) })?;
    Some(at + found.start..at + found.end)
}

/// `ghp_…`: a token known by its prefix, which stays visible.
fn prefixed_token(text: &str) -> Option<Range<usize>> {
    let prefix = PREFIXES.iter().find(|prefix| text.starts_with(**prefix))?;
    let rest = &text[prefix.len()..];
    // `npm_config_cache_max` is not a token: after a prefix with `_`, tokens contain no further
    // `_`.
    let separators = if prefix.ends_with('_') { "" } else { "-_" };
    let counts = |letter: char| letter.is_ascii_alphanumeric() || separators.contains(letter);
    let enough = length(rest, counts) >= SHORTEST_TOKEN;
    let whole = length(rest, |letter| letter.is_ascii_alphanumeric() || "-_".contains(letter));
    enough.then(|| prefix.len()..prefix.len() + whole)
}

/// `Bearer …` without a name before it.
fn bearer_token(text: &str) -> Option<Range<usize>> {
    // The other schemes are ordinary English words.
    let skip = scheme(text)
        .filter(|_| text.get(..6).is_some_and(|word| word.eq_ignore_ascii_case("bearer")))?;
    let value = length(&text[skip..], |letter| {
        letter.is_ascii_alphanumeric() || "-._~+/=%".contains(letter)
    });
    (value > 0).then(|| skip..skip + value)
}

/// `password=…`, `"token": "…"`, `Authorization: Basic …`.
fn named_value(text: &str) -> Option<Range<usize>> {
    let name = length(text, is_name_letter);
    if !is_name(&text[..name]) {
        return None;
    }
    let closed = text[name..].trim_start_matches(['\\', '"', '\'', '`', ']', ')']).trim_start();
    let begin = ["=>", ":=", "==", "=", ":"].iter().find_map(|sign| closed.strip_prefix(sign))?;
    // A path in source code, such as `token::Kind`.
    if begin.starts_with(':') {
        return None;
    }
    let value = begin.trim_start();
    let at = text.len() - value.len();
    secret_part(value).map(|found| at + found.start..at + found.end)
}

/// The secret part of a value: without quotes and scheme.
fn secret_part(value: &str) -> Option<Range<usize>> {
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

/// Length of the text before the closing delimiter, or of all of it.
fn until(text: &str, close: &str) -> usize {
    let mut at = 0;
    while let Some(letter) = text[at..].chars().next() {
        if text[at..].starts_with(close) {
            return at;
        }
        at += letter.len_utf8();
        // An escaped character does not close the value.
        if letter == '\\' && close.len() == 1 {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    at
}

/// Length of an authentication scheme and the space after it, if the text starts with one.
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
    fn secrets_are_masked_and_other_text_kept() {
        for (input, expected) in [
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
            assert_eq!(redact(input), expected);
        }
    }

    #[test]
    fn url_logins_are_found_and_stripped() {
        let text = "URIs: http://a:p@ss@m.test/debian https://b@c/ http://d/e@f http://u:p<w>\\@g";
        let found: Vec<&str> = url_logins(text).map(|login| &text[login]).collect();
        assert_eq!(found, ["a:p@ss", "b", "u:p<w>\\"]);
        assert_eq!(
            strip_url_logins(text),
            "URIs: http://m.test/debian https://c/ http://d/e@f http://g"
        );
    }

    #[test]
    fn ordinary_lines_are_unchanged() {
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
            assert_eq!(redact(line), line);
        }
    }

    proptest! {
        #[test]
        fn any_text_keeps_its_line_count(
            text in "(\\PC|[ \n=:@/\"\\\\\\[{]|token|bearer |://|ghp_){0,80}"
        ) {
            prop_assert_eq!(redact(&text).matches('\n').count(), text.matches('\n').count());
        }

        #[test]
        fn values_of_secret_names_are_masked(
            value in "[a-zA-Z0-9]{8,30}",
            before in "[a-z]{1,5}",
        ) {
            for text in [
                format!("X_TOKEN={value}"),
                format!("password: {value}"),
                format!("h://u:{value}@x/y"),
                format!(r#"{{"{before}":"{before}","token":"{value}"}}"#),
                format!("?{before}={before}&token={value}"),
            ] {
                prop_assert!(!redact(&text).contains(&value), "{}", redact(&text));
            }
        }
    }
}
