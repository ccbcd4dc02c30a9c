//! Masks the values of secrets in texts. The mask is as long as the value, so sizes stay valid.
//! Pure.

use std::collections::BTreeSet;

use harvest_gateway::ledger::NamedSecret;

const MASK: char = '*';
// Shorter values occur in ordinary text.
const SHORTEST: usize = 8;

/// The texts to mask, the longest first: a value may contain another.
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
        texts.sort_by_key(|known| std::cmp::Reverse(known.text.len()));
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
        let (mut masked, mut found) = (text, BTreeSet::new());
        for known in &self.0 {
            if masked.contains(&known.text) {
                let mask = MASK.to_string().repeat(known.text.len());
                masked = masked.replace(&known.text, &mask);
                found.insert(known.secret.as_str());
            }
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
        let secrets = [("KEY", "first-value"), ("LONG", "first-value-2"), ("SHORT", "word")];
        let secrets = secrets.map(|(name, value)| NamedSecret {
            name: name.to_owned(),
            value: Secret::new(value.to_owned()),
        });
        let mask = SecretMask::new(secrets);
        let (masked, found) = mask.mask_naming("a first-value-2, a word".to_owned());
        assert_eq!(masked, format!("a {}, a word", "*".repeat(13)));
        assert_eq!(found, ["LONG"].into());
        assert!(!format!("{mask:?}").contains("value"));
    }
}
