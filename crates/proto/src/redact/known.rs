//! Covers secrets that we were told of, besides whatever has the shape of one.

use super::MASK;

// Shorter ones are more often part of a word than anybody's secret.
const SHORTEST: usize = 4;

// Of a secret of several lines, such as a key, each line that cannot be guessed.
const SHORTEST_LINE: usize = 16;

/// What is to be covered.
#[derive(Default, Clone)]
pub struct Redaction(Vec<String>);

/// Tells no secret of it.
impl std::fmt::Debug for Redaction {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Redaction").field(&self.0.len()).finish()
    }
}

impl Redaction {
    /// Of nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Notes a value, also as it looks inside a quoted text.
    pub fn learn(&mut self, secret: &str) {
        let quoted = serde_json::to_string(secret).unwrap_or_default();
        let quoted = quoted.trim_matches('"').to_owned();
        let lines = secret.lines().map(str::trim);
        let lines = lines.filter(|line| line.len() >= SHORTEST_LINE && !line.starts_with("-----"));
        for value in [secret.trim().to_owned(), quoted].into_iter().chain(lines.map(str::to_owned))
        {
            if value.len() >= SHORTEST && !self.0.contains(&value) {
                self.0.push(value);
            }
        }
        // The longest first, so that none is left half-covered by a shorter one in it.
        self.0.sort_by_key(|known| std::cmp::Reverse(known.len()));
    }

    /// The text without secrets.
    #[must_use]
    pub fn cover(&self, text: &str) -> String {
        let known = self.0.iter().fold(text.to_owned(), |line, secret| {
            match line.contains(secret.as_str()) {
                true => line.replace(secret.as_str(), MASK),
                false => line,
            }
        });
        super::cover(&known)
    }
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
    fn what_only_looks_like_a_secret_is_covered_too() {
        assert_eq!(Redaction::new().cover("GET /x?a=1&token=abc"), "GET /x?a=1&token=***");
    }
}
