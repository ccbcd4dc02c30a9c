//! What can go wrong in the engine, each with what was being done and to what.

use std::{io, path::PathBuf};

use harvest_proto::{SandboxId, SnapshotId};

use crate::{
    guest::GuestError, oci::PullError, recipe::RecipeError, room::shown, rootless::RootlessError,
    spec::LayerId, unpack::UnpackError, volume::VolumeName,
};

/// Why the engine could not do it.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The image is not there.
    #[error("image `{image}` is not on this host")]
    ImageMissing {
        /// Its name.
        image: String,
    },
    /// The snapshot is not there.
    #[error("snapshot {snapshot} is not on this host")]
    SnapshotMissing {
        /// Its id.
        snapshot: SnapshotId,
    },
    /// A layer is not there.
    #[error("layer `{layer}` is not on this host")]
    LayerMissing {
        /// Its id.
        layer: LayerId,
    },
    /// Nobody knows this sandbox, or it has ended.
    #[error("sandbox {sandbox} does not run")]
    NotRunning {
        /// Its id.
        sandbox: SandboxId,
    },
    /// The id is taken.
    #[error("sandbox {sandbox} exists already")]
    Exists {
        /// Its id.
        sandbox: SandboxId,
    },
    /// The spec makes no sense.
    #[error("{reason}")]
    Invalid {
        /// Why.
        reason: String,
    },
    /// The volume is not there.
    #[error("there is no volume `{volume}`")]
    VolumeMissing {
        /// Its name.
        volume: VolumeName,
    },
    /// The name is taken.
    #[error("volume `{volume}` exists already")]
    VolumeExists {
        /// Its name.
        volume: VolumeName,
    },
    /// A sandbox has it.
    #[error("volume `{volume}` is in use")]
    VolumeInUse {
        /// Its name.
        volume: VolumeName,
    },
    /// A program that makes or mends volumes failed.
    #[error("{program} failed on volume `{volume}`: {said}")]
    VolumeTool {
        /// Which volume.
        volume: VolumeName,
        /// Which program.
        program: &'static str,
        /// What it said.
        said: String,
    },
    /// The host's disk is too full.
    #[error("no room for {what}: {needed_bytes} bytes are needed and {free_bytes} are free")]
    NoRoom {
        /// What was to be made.
        what: String,
        /// With what is always left free.
        needed_bytes: u64,
        /// What the host has.
        free_bytes: u64,
    },
    /// The zygote refused, in its own words.
    #[error("cannot {doing} sandbox {sandbox}: {reason}")]
    Refused {
        /// What was asked for.
        doing: &'static str,
        /// Of which.
        sandbox: SandboxId,
        /// Its words, cause after cause.
        reason: String,
    },
    /// The zygote could not be started or reached.
    #[error("cannot reach the zygote: {reason}")]
    Zygote {
        /// Why.
        reason: String,
    },
    /// The id names a snapshot taken while the sandbox ran.
    #[error("snapshot {snapshot} exists already and is older than the sandbox's disk")]
    SnapshotTaken {
        /// Its id.
        snapshot: SnapshotId,
    },
    /// The disk is too full to begin this.
    #[error("cannot {doing}: only {} are free below {}, {} are to stay free", shown(*free), path.display(), shown(*needed))]
    DiskLow {
        /// What was asked for.
        doing: &'static str,
        /// Where it would go.
        path: PathBuf,
        /// Bytes free there.
        free: u64,
        /// Bytes that have to be.
        needed: u64,
        /// What to do about it.
        hint: &'static str,
    },
    /// A text is no recipe.
    #[error("the recipe makes no sense")]
    Recipe(#[from] RecipeError),
    /// A step of a build failed.
    #[error("cannot {what}\n{}", tail.join("\n"))]
    Build {
        /// The step.
        what: String,
        /// The last lines it said.
        tail: Vec<String>,
        /// What to do about it.
        hint: &'static str,
    },
    /// An archive or folder cannot become an image.
    #[error("cannot make an image of {what}")]
    Unpack {
        /// The archive or folder.
        what: String,
        /// Why.
        source: UnpackError,
    },
    /// An image cannot be pulled.
    #[error("cannot pull {reference}")]
    Pull {
        /// What was asked for.
        reference: String,
        /// Why.
        source: PullError,
    },
    /// A sandbox's supervisor could not be spoken to.
    #[error("cannot {doing}")]
    Bridge {
        /// What was being done.
        doing: String,
        /// What it said.
        source: GuestError,
    },
    /// The user is not root and cannot act as if.
    #[error("this user cannot run sandboxes")]
    Rootless(#[from] RootlessError),
    /// A file or folder said no.
    #[error("cannot {doing} {}", path.display())]
    File {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A record cannot be understood.
    #[error("the record {} cannot be read", path.display())]
    Record {
        /// Its file.
        path: PathBuf,
        /// Where it stops making sense.
        source: serde_json::Error,
    },
}

/// Names what was being done when a system call failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub(crate) struct StepError {
    doing: String,
    source: io::Error,
}

/// Adds what was being done to an error of the system.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, StepError> {
        self.map_err(|source| StepError { doing: what(), source: source.into() })
    }
}

impl StepError {
    pub(crate) fn new(doing: impl Into<String>, source: io::Error) -> Self {
        Self { doing: doing.into(), source }
    }

    /// The error and its cause in one line, for where only text can travel.
    pub(crate) fn line(&self) -> String {
        format!("{}: {}", self.doing, self.source)
    }
}

/// An [`EngineError::File`] in one word.
pub(crate) trait AtPath<T> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T, EngineError>;
}

impl<T, E: Into<io::Error>> AtPath<T> for Result<T, E> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T, EngineError> {
        self.map_err(|source| EngineError::File { doing, path: path.into(), source: source.into() })
    }
}
