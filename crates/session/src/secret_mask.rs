//! Masks the values of secrets in texts. Pure.

use std::{collections::BTreeSet, ops::Range};

use harvest_gateway::ledger::NamedSecret;

const MASK: char = '*';
// Shorter values occur in ordinary text.
const SHORTEST: usize = 8;

/// The texts to mask.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct SecretMask(Vec<MaskedText>);

#[derive(Clone, PartialEq, Eq)]
struct MaskedText {
    text: String,
    secret: String,
}

impl std::fmt::Debug for MaskedText {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "MaskedText({})", self.secret)
    }
}

impl SecretMask {
    pub(crate) fn new(secrets: impl IntoIterator<Item = NamedSecret>) -> Self {
        let mut texts = Vec::<MaskedText>::new();
        for NamedSecret { name, value } in secrets {
            let value = value.expose().trim();
            let quoted = serde_json::to_string(value).unwrap_or_default();
            let quoted = quoted.trim_matches('"').to_owned();
            for text in [value.to_owned(), quoted] {
                if text.len() >= SHORTEST && texts.iter().all(|known| known.text != text) {
                    texts.push(MaskedText { text, secret: name.clone() });
                }
            }
        }
        Self(texts)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text with every value masked. It keeps its number of bytes, so sizes stay valid.
    pub(crate) fn mask(&self, text: String) -> String {
        self.replace(text, str::len).0
    }

    /// The text with every value masked, and the names of the secrets that it contained. It keeps
    /// its number of characters, by which prompts are limited.
    pub(crate) fn mask_naming(&self, text: String) -> (String, BTreeSet<&str>) {
        self.replace(text, |value| value.chars().count())
    }

    fn replace(&self, text: String, length: fn(&str) -> usize) -> (String, BTreeSet<&str>) {
        // All are found before any is masked: they can overlap.
        let (mut ranges, mut found) = (Vec::new(), BTreeSet::new());
        for known in &self.0 {
            for (at, value) in text.match_indices(&known.text) {
                ranges.push(at..at + value.len());
                found.insert(known.secret.as_str());
            }
        }
        ranges.sort_by_key(|range: &Range<usize>| range.start);
        let (mut masked, mut at) = (String::new(), 0);
        for range in ranges {
            // The end of a value may have been masked with the one before.
            let start = range.start.max(at);
            masked += &text[at..start];
            let end = range.end.max(start);
            masked.extend(std::iter::repeat_n(MASK, length(&text[start..end])));
            at = end;
        }
        masked += &text[at..];
        (masked, found)
    }

    /// The length of the longest end of the text with which a value begins.
    pub(crate) fn possible_start(&self, text: &str) -> usize {
        let starts = |known: &MaskedText| {
            let value = known.text.as_bytes();
            (1..value.len()).rev().find(|length| text.as_bytes().ends_with(&value[..*length]))
        };
        self.0.iter().filter_map(starts).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::Secret;

    use super::*;

    #[test]
    fn masked_secrets_are_named() {
        let secrets = [("KEY", "first-value"), ("LONG", "value-second"), ("SHORT", "word")];
        let secrets = secrets.map(|(name, value)| NamedSecret {
            name: name.to_owned(),
            value: Secret::new(value.to_owned()),
        });
        let mask = SecretMask::new(secrets);
        let (masked, found) = mask.mask_naming("a first-value-second, a word".to_owned());
        assert_eq!(masked, format!("a {}, a word", "*".repeat(18)));
        assert_eq!(found, ["KEY", "LONG"].into());
        assert_eq!(mask.mask_naming("a value-".to_owned()), ("a value-".to_owned(), [].into()));
        assert!(!format!("{mask:?}").contains("value"));
    }

    #[test]
    fn prompts_keep_their_characters_and_events_their_bytes() {
        let value = "k\u{e9}y-planted";
        let key = NamedSecret { name: "KEY".to_owned(), value: Secret::new(value.to_owned()) };
        let mask = SecretMask::new([key]);
        assert_eq!(mask.mask_naming(format!("a{value}b")).0, format!("a{}b", "*".repeat(11)));
        assert_eq!(mask.mask(format!("a{value}b")), format!("a{}b", "*".repeat(12)));
        assert_eq!(mask.mask(value.repeat(2)), "*".repeat(24));
    }
}
