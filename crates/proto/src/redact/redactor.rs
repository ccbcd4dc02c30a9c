//! Masks known secret values, besides everything that looks like a secret.

use super::MASK;

// Shorter values occur in ordinary words.
const SHORTEST: usize = 4;

// Lines of a multi-line secret, such as a private key, are masked one by one from this length.
const SHORTEST_LINE: usize = 16;

/// A set of secret values to mask.
#[derive(Default, Clone)]
pub struct Redactor(Vec<String>);

/// Prints only the number of values.
impl std::fmt::Debug for Redactor {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Redactor").field(&self.0.len()).finish()
    }
}

impl Redactor {
    /// A redactor without known values.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a secret value; its JSON-escaped form and its long lines are masked as well.
    pub fn add(&mut self, secret: &str) {
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
        // Longest first, so that no value is half masked by a shorter one inside it.
        self.0.sort_by_key(|known| std::cmp::Reverse(known.len()));
    }

    /// Masks the known values, and everything that looks like a secret.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        let known = self.0.iter().fold(text.to_owned(), |line, secret| {
            match line.contains(secret.as_str()) {
                true => line.replace(secret.as_str(), MASK),
                false => line,
            }
        });
        super::redact(&known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values_are_masked_in_every_form() {
        let mut known = Redactor::new();
        known.add("s3cret-value");
        known.add("s3cret-value-that-is-longer");
        known.add("two\"lines\nof-a-long-private-key");
        known.add("abc");
        assert_eq!(known.redact("a s3cret-value-that-is-longer b s3cret-value"), "a *** b ***");
        for line in [
            "two\"lines\nof-a-long-private-key",
            r#"{"a":"two\"lines\nof-a-long-private-key"}"#,
            "of-a-long-private-key",
        ] {
            assert!(!known.redact(line).contains("private"), "{line}");
        }
        assert_eq!(known.redact("abc"), "abc");
    }

    #[test]
    fn unknown_secrets_are_masked_by_pattern() {
        assert_eq!(Redactor::new().redact("GET /x?a=1&token=abc"), "GET /x?a=1&token=***");
    }
}
