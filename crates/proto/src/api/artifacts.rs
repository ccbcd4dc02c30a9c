//! Artifacts: files that agents hand over, kept with their session.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, text::quoted};

/// Maximum size of an artifact.
pub const MAX_ARTIFACT_BYTES: u64 = 50_000_000;

/// Maximum size of all artifacts of a session.
pub const MAX_ARTIFACTS_BYTES: u64 = 500_000_000;

const MAX_NAME_CHARACTERS: usize = 100;

/// A file that an agent handed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Artifact {
    /// Its name, unique in its session.
    pub name: String,
    /// Its type, as the agent declared it.
    pub media_type: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its content, in hexadecimal.
    pub sha256: String,
    /// Time at which it was handed over.
    pub created_at: Timestamp,
}

/// Why a text is not the name or the type of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidArtifact {
    /// Not a file name.
    #[error("invalid name `{0}`: use 1 to {MAX_NAME_CHARACTERS} characters without `/`")]
    Name(String),
    /// Not a media type.
    #[error("invalid media type `{0}`: use TYPE/SUBTYPE, such as image/png")]
    MediaType(String),
}

/// Checks the name of an artifact, which becomes a file name.
///
/// # Errors
/// When it cannot be one.
pub fn check_artifact_name(name: &str) -> Result<(), InvalidArtifact> {
    let valid = (1..=MAX_NAME_CHARACTERS).contains(&name.chars().count())
        && !matches!(name, "." | "..")
        && name.trim() == name
        && !name.chars().any(|letter| letter == '/' || letter.is_control());
    valid.then_some(()).ok_or_else(|| InvalidArtifact::Name(quoted(name)))
}

/// Checks a media type without parameters, which becomes a header.
///
/// # Errors
/// When it is none.
pub fn check_media_type(text: &str) -> Result<(), InvalidArtifact> {
    let token = |part: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&-^_.+".contains(&byte);
        (1..=60).contains(&part.len()) && part.bytes().all(plain)
    };
    let valid = text.split_once('/').is_some_and(|(kind, sub)| token(kind) && token(sub));
    valid.then_some(()).ok_or_else(|| InvalidArtifact::MediaType(quoted(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_file_names() {
        for good in ["report.html", "Screenshot 1.png", "ä", &"x".repeat(100)] {
            assert_eq!(check_artifact_name(good), Ok(()), "{good}");
        }
        for bad in ["", ".", "..", "a/b", " a", "a\n", &"x".repeat(101)] {
            assert!(check_artifact_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_media_type("application/vnd.a+json").is_ok());
        for bad in ["", "png", "a/b/c", "text/html; charset=x", "a/\r\nb"] {
            assert!(check_media_type(bad).is_err(), "{bad:?}");
        }
    }
}
