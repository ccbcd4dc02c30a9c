//! Ids: one type per resource, printed with a prefix, so that ids of different resources cannot be
//! confused.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::text::string_conversions;

// Crockford's alphabet in lower case: no i, l, o or u, so an id survives being read aloud.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

// 12 characters of 5 bits: 60 random bits, short enough to type and long enough never to collide.
const LENGTH: usize = 12;

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an id of the form {prefix}_{}", "x".repeat(LENGTH))]
pub struct ParseIdError {
    prefix: &'static str,
    text: String,
}

fn random_part() -> String {
    let mut bytes = [0u8; LENGTH];
    getrandom::fill(&mut bytes).expect("Linux has a random source");
    bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect()
}

fn parse_part(prefix: &'static str, text: &str) -> Result<String, ParseIdError> {
    text.strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix('_'))
        .filter(|part| part.len() == LENGTH && part.bytes().all(|byte| ALPHABET.contains(&byte)))
        .map(str::to_owned)
        .ok_or_else(|| ParseIdError { prefix, text: text.to_owned() })
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal,)+) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
        pub struct $name(String);

        impl $name {
            /// Prefix of every id of this type.
            pub const PREFIX: &'static str = $prefix;

            /// A new random id.
            #[must_use]
            pub fn random() -> Self {
                Self(random_part())
            }

            /// The part after the prefix, for names with a prefix of their own (a branch, a
            /// cgroup).
            #[must_use]
            pub fn part(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, concat!($prefix, "_{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, out)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                parse_part($prefix, text).map(Self)
            }
        }

        string_conversions!($name, ParseIdError);
    )+};
}

ids! {
    /// A session: one conversation with its sandbox, queue and history.
    SessionId = "ses",
    /// A prompt in a session's queue.
    PromptId = "prm",
    /// A turn: one run of a prompt.
    TurnId = "trn",
    /// A sandbox.
    SandboxId = "sbx",
    /// A snapshot of a sandbox.
    SnapshotId = "snp",
    /// An image: a stack of layers and its config.
    ImageId = "img",
    /// A blob: the complete content of an event that was cut.
    BlobId = "blb",
    /// A call of a model.
    CallId = "cll",
    /// A verification: one run of a repository's check.
    VerificationId = "ver",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_round_trips_as_text() {
        let id = SessionId::random();
        assert_eq!(id.to_string().parse(), Ok(id.clone()));
        assert_eq!(
            serde_json::from_str::<SessionId>(&serde_json::to_string(&id).unwrap()).unwrap(),
            id
        );
    }

    #[test]
    fn id_with_another_prefix_is_refused() {
        assert!(PromptId::random().to_string().parse::<SessionId>().is_err());
        assert!("ses_short".parse::<SessionId>().is_err());
        assert!("ses_../../../etc".parse::<SessionId>().is_err());
    }
}
