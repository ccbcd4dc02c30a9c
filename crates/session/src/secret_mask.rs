//! Masks the values of secrets in texts. The mask is as long as the value, so sizes stay valid.
//! Pure.

use std::collections::BTreeSet;

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

    /// The text with every value masked.
    pub(crate) fn mask(&self, text: String) -> String {
        self.mask_naming(text).0
    }

    /// The text with every value masked, and the names of the secrets that it contained.
    pub(crate) fn mask_naming(&self, text: String) -> (String, BTreeSet<&str>) {
        // All are found before any is masked: they can overlap.
        let (mut ranges, mut found) = (Vec::new(), BTreeSet::new());
        for known in &self.0 {
            for (at, value) in text.match_indices(&known.text) {
                ranges.push(at..at + value.len());
                found.insert(known.secret.as_str());
            }
        }
        let mut masked = text;
        for range in ranges {
            let mask = MASK.to_string().repeat(range.len());
            masked.replace_range(range, &mask);
        }
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
}
