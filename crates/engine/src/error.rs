//! The engine's errors. Each names what was being done and to what.

use std::{borrow::Cow, io, path::PathBuf};

use harvest_proto::{
    SandboxId, SnapshotId,
    hint::{DISK_FULL, Hint},
};

use crate::{
    rootless::RootlessError,
    spec::{LayerId, VolumeName},
};

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The image does not exist.
    #[error("image `{image}` is not on this host")]
    ImageMissing {
        /// Name of the image.
        image: String,
    },
    /// The snapshot does not exist.
    #[error("snapshot {snapshot} is not on this host")]
    SnapshotMissing {
        /// Id of the snapshot.
        snapshot: SnapshotId,
    },
    /// A layer does not exist.
    #[error("layer `{0}` is not on this host")]
    LayerMissing(LayerId),
    /// The sandbox is unknown or has ended.
    #[error("sandbox {sandbox} is not running")]
    NotRunning {
        /// Id of the sandbox.
        sandbox: SandboxId,
    },
    /// A sandbox with this id exists.
    #[error("sandbox {0} already exists")]
    Exists(SandboxId),
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The volume does not exist.
    #[error("there is no volume `{volume}`")]
    VolumeMissing {
        /// Name of the volume.
        volume: VolumeName,
    },
    /// A volume with this name exists.
    #[error("volume `{0}` already exists")]
    VolumeExists(VolumeName),
    /// A sandbox uses the volume.
    #[error("volume `{0}` is in use")]
    VolumeInUse(VolumeName),
    /// A program that creates or repairs volumes failed.
    #[error("{program} failed on volume `{volume}`: {message}")]
    VolumeTool {
        /// Name of the volume.
        volume: VolumeName,
        /// Name of the program.
        program: &'static str,
        /// Its error output.
        message: String,
    },
    /// The host's disk is too full.
    #[error("not enough disk space for {what}: {needed_bytes} bytes needed, {free_bytes} free")]
    NoRoom {
        /// What was to be created.
        what: String,
        /// Required free space, including the reserve.
        needed_bytes: u64,
        /// Free space.
        free_bytes: u64,
    },
    /// The zygote reported an error.
    #[error("cannot {doing} sandbox {sandbox}: {reason}")]
    Refused {
        /// The requested operation.
        doing: &'static str,
        /// The sandbox.
        sandbox: SandboxId,
        /// The zygote's error chain in one line.
        reason: String,
    },
    /// The zygote could not be started or reached.
    #[error("cannot reach the process that runs sandboxes (zygote): {0}")]
    Zygote(String),
    /// The id belongs to a snapshot that was taken while the sandbox ran.
    #[error("snapshot {0} already exists and is older than the sandbox's disk")]
    SnapshotTaken(SnapshotId),
    /// Free space is below the threshold for this operation.
    #[error("cannot {doing}: only {} free in {}, at least {} required", format_bytes(*free), path.display(), format_bytes(*needed))]
    DiskLow {
        /// The requested operation.
        doing: &'static str,
        /// Folder that needs the space.
        path: PathBuf,
        /// Free bytes.
        free: u64,
        /// Required free bytes.
        needed: u64,
        /// How to fix it.
        hint: &'static str,
    },
    /// The user is not root and has no usable user namespace.
    #[error("this user cannot run sandboxes")]
    Rootless(#[from] RootlessError),
    /// A file operation failed.
    #[error("cannot {doing} {}", path.display())]
    File {
        /// The operation.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A record on disk is invalid.
    #[error("invalid record {}", path.display())]
    Record {
        /// The record's file.
        path: PathBuf,
        /// The parse error.
        source: serde_json::Error,
    },
}

impl EngineError {
    /// An [`EngineError::File`].
    pub(crate) fn file(
        doing: &'static str,
        path: impl Into<PathBuf>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::File { doing, path: path.into(), source: source.into() }
    }
}

/// A failed system call and what it was for.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub(crate) struct StepError {
    doing: String,
    source: io::Error,
}

/// Adds what was being done to an I/O error.
pub(crate) trait Doing<T> {
    fn doing<W: Into<String>>(self, what: impl FnOnce() -> W) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing<W: Into<String>>(self, what: impl FnOnce() -> W) -> Result<T, StepError> {
        self.map_err(|source| StepError::new(what(), source))
    }
}

impl StepError {
    pub(crate) fn new(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self { doing: doing.into(), source: source.into() }
    }

    /// The error and its cause in one line, for text-only channels.
    pub(crate) fn line(&self) -> String {
        format!("{}: {}", self.doing, self.source)
    }
}

/// Turns an I/O error into [`EngineError::File`].
pub(crate) trait AtPath<T> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T, EngineError>;
}

impl<T, E: Into<io::Error>> AtPath<T> for Result<T, E> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T, EngineError> {
        self.map_err(|source| EngineError::file(doing, path, source))
    }
}

impl Hint for EngineError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::NoRoom { .. } => Some(DISK_FULL.into()),
            Self::DiskLow { hint, .. } => Some((*hint).into()),
            Self::Rootless(error) => error.hint(),
            Self::File { source, .. } => source.hint(),
            _ => None,
        }
    }
}

/// A size as text, in GB or MB with one decimal.
fn format_bytes(bytes: u64) -> String {
    let (unit, name) =
        if bytes >= 1_000_000_000 { (1_000_000_000, "GB") } else { (1_000_000, "MB") };
    format!("{}.{} {name}", bytes / unit, bytes % unit / (unit / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal() {
        assert_eq!(format_bytes(1_234_567_890), "1.2 GB");
        assert_eq!(format_bytes(56_700_000), "56.7 MB");
        assert_eq!(format_bytes(0), "0.0 MB");
    }
}
