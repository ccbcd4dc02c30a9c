//! Ids: one type per kind of thing, printed with a prefix, so that no id can stand for another.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

// Crockford's alphabet in lower case: no i, l, o or u, so an id survives being read aloud.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

// 12 characters of 5 bits: 60 random bits, short enough to type and rare enough never to meet.
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
    getrandom::fill(&mut bytes)
        .expect("the kernel's random source is there on every Linux we support");
    bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect()
}

fn parse_part(prefix: &'static str, text: &str) -> Result<String, ParseIdError> {
    text.strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix('_'))
        .filter(|part| part.len() == LENGTH && part.bytes().all(|byte| ALPHABET.contains(&byte)))
        .map(str::to_owned)
        .ok_or_else(|| ParseIdError { prefix, text: text.to_owned() })
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
        pub struct $name(String);

        impl $name {
            /// What every id of this kind begins with.
            pub const PREFIX: &'static str = $prefix;

            /// An id nobody has used yet.
            #[must_use]
            pub fn random() -> Self {
                Self(random_part())
            }

            /// The part after the prefix, for names that carry their own (a branch, a cgroup).
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

        impl TryFrom<String> for $name {
            type Error = ParseIdError;

            fn try_from(text: String) -> Result<Self, ParseIdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.to_string()
            }
        }
    };
}

id!(
    /// One conversation with its machine, its queue and its history.
    SessionId, "ses"
);
id!(
    /// One message in a session's queue.
    PromptId, "prm"
);
id!(
    /// One prompt carried out.
    TurnId, "trn"
);
id!(
    /// One running machine.
    SandboxId, "sbx"
);
id!(
    /// An image captured from a sandbox.
    SnapshotId, "snp"
);
id!(
    /// A stack of layers with its config.
    ImageId, "img"
);

id!(
    /// The whole of something an event holds only the ends of.
    BlobId, "blb"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_printing_and_parsing() {
        let id = SessionId::random();
        assert_eq!(id.to_string().parse(), Ok(id.clone()));
        assert_eq!(
            serde_json::from_str::<SessionId>(&serde_json::to_string(&id).unwrap()).unwrap(),
            id
        );
    }

    #[test]
    fn an_id_of_another_kind_is_refused() {
        assert!(PromptId::random().to_string().parse::<SessionId>().is_err());
        assert!("ses_short".parse::<SessionId>().is_err());
        assert!("ses_../../../etc".parse::<SessionId>().is_err());
    }
}
