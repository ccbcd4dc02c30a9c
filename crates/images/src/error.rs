//! Why an image could not be made: what was attempted, on what, and the cause.

use std::{borrow::Cow, io, path::PathBuf};

use harvest_engine::{EngineError, supervisor_client::SupervisorClientError};
use harvest_proto::Hint;

use crate::{oci::PullError, recipe::RecipeError, unpack::UnpackError};

/// Why an image could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The engine could not find, store or run what the image needs.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The recipe is invalid.
    #[error("the recipe is invalid")]
    Recipe(#[from] RecipeError),
    /// The request cannot be carried out, whatever the state of the host.
    #[error("{reason}")]
    Invalid { reason: String },
    /// A build step failed.
    #[error("cannot {what}\n{}", tail.join("\n"))]
    Step {
        what: String,
        /// The last lines of its output and how it ended.
        tail: Vec<String>,
        hint: &'static str,
    },
    /// An archive or folder cannot become an image.
    #[error("cannot make an image of {what}")]
    Unpack { what: String, source: UnpackError },
    /// An image cannot be pulled.
    #[error("cannot pull {reference}")]
    Pull {
        /// The reference as it was given, without a login.
        reference: String,
        source: PullError,
    },
    /// The connection to a build sandbox's supervisor failed.
    #[error("cannot {doing}")]
    Bridge { doing: String, source: SupervisorClientError },
    /// A file or folder cannot be read or written.
    #[error("cannot {doing} {}", path.display())]
    File { doing: &'static str, path: PathBuf, source: io::Error },
}

impl ImageError {
    /// An error about a file or folder.
    pub(crate) fn file(
        doing: &'static str,
        path: impl Into<PathBuf>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::File { doing, path: path.into(), source: source.into() }
    }
}

impl Hint for ImageError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Engine(error) => error.hint(),
            Self::Step { hint, .. } => Some((*hint).into()),
            Self::File { source, .. } => source.hint(),
            Self::Unpack { source: UnpackError::Owner { .. }, .. } => Some(
                "pack it with `tar --owner=0 --group=0`, or with the ids used in the sandbox"
                    .into(),
            ),
            Self::Unpack { source: UnpackError::Limit { .. }, .. } => {
                Some("raise the limit with --max-size".into())
            }
            _ => None,
        }
    }
}
