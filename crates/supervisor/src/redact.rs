//! Takes what looks like a secret out of a program's last words, before they become an event that is stored
//! for good. The platform puts no secret into a sandbox; what a repository's own scripts print is another
//! matter. It knows shapes, not secrets: it is a net, not a promise.

const MASK: &str = "***";

/// Names whose values are nobody's business, in lower case and without separators.
const NAMES: [&str; 9] = [
    "password",
    "passwd",
    "secret",
    "token",
    "apikey",
    "accesskey",
    "privatekey",
    "credential",
    "authorization",
];

/// What tokens of well-known services begin with.
const PREFIXES: [&str; 12] = [
    "ghp_",
    "gho_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "glpat-",
    "sk-",
    "xoxb-",
    "xoxp-",
    "AKIA",
    "npm_",
    "hvt_",
];

// Shorter words with such a beginning are words.
const SHORTEST_TOKEN: usize = 16;

/// The same without what looks like a secret.
pub(crate) fn text(text: &str) -> String {
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn line(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut hidden = false;
    for piece in line.split_inclusive(char::is_whitespace) {
        let word = piece.trim_end();
        let (space, bare) = (&piece[word.len()..], word.trim_matches(['"', '\'', ',']));
        if hidden && !bare.is_empty() && !is_scheme(bare) {
            out.push_str(MASK);
            hidden = false;
        } else {
            out.push_str(&masked(word));
            // `password: …`, `"token": "…"`, `Authorization: Bearer …`.
            hidden = hidden || is_scheme(bare) || bare.strip_suffix([':', '=']).is_some_and(is_name);
        }
        out.push_str(space);
    }
    out
}

fn is_scheme(word: &str) -> bool {
    word.eq_ignore_ascii_case("bearer") || word.eq_ignore_ascii_case("basic")
}

fn is_name(word: &str) -> bool {
    let plain: String = word.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.to_ascii_lowercase();
    NAMES.iter().any(|name| plain.ends_with(name))
}

fn masked(word: &str) -> String {
    if let Some((name, value)) = word.split_once('=').or_else(|| word.split_once("\":"))
        && is_name(name)
        && !value.trim_matches(['"', '\'']).is_empty()
    {
        let between = &word[name.len()..word.len() - value.len()];
        return format!("{name}{between}{MASK}");
    }
    if let Some((scheme, rest)) = word.split_once("://")
        && let Some((_, after)) = rest.split('/').next().and_then(|host| host.rsplit_once('@'))
    {
        let path = &rest[rest.find('/').unwrap_or(rest.len())..];
        return format!("{scheme}://{MASK}@{after}{path}");
    }
    for prefix in PREFIXES {
        if let Some(start) = word.find(prefix) {
            let tail = &word[start..];
            let end = tail.find(|letter: char| !letter.is_ascii_alphanumeric() && !"-_".contains(letter));
            let end = end.unwrap_or(tail.len());
            if end >= SHORTEST_TOKEN {
                return format!("{}{MASK}{}", &word[..start], &tail[end..]);
            }
        }
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_looks_like_a_secret_is_masked_and_the_rest_stays() {
        for (said, told) in [
            (
                "cannot clone https://ada:s3cret@git.example.org/x.git",
                "cannot clone https://***@git.example.org/x.git",
            ),
            ("DB_PASSWORD=hunter2 ./run", "DB_PASSWORD=*** ./run"),
            ("api_key: abc123", "api_key: ***"),
            (r#"{"token":"abc","user":"ada"}"#, r#"{"token":***"#),
            ("Authorization: Bearer eyJhbGciOi", "Authorization: Bearer ***"),
            ("using ghp_0123456789abcdefghij now", "using *** now"),
            ("no tokens here: sk-y is a word", "no tokens here: sk-y is a word"),
            ("make: *** [Makefile:3: all] Error 1", "make: *** [Makefile:3: all] Error 1"),
            ("see https://example.org/a@b and a=b", "see https://example.org/a@b and a=b"),
        ] {
            assert_eq!(text(said), told);
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic_and_lines_stay_lines(said in "(\\PC|[ \n=:@/\"]|token|bearer|://){0,80}") {
            prop_assert_eq!(text(&said).matches('\n').count(), said.matches('\n').count());
        }

        #[test]
        fn a_value_behind_such_a_name_is_never_told(value in "[a-zA-Z0-9]{8,30}") {
            for said in [format!("X_TOKEN={value}"), format!("password: {value}"), format!("h://u:{value}@x/y")] {
                prop_assert!(!text(&said).contains(&value), "{}", text(&said));
            }
        }
    }
}
