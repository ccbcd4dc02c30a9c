//! Unpacks an archive into a folder that becomes a layer. The archive is untrusted: every access
//! goes through a descriptor below the layer's root, symlinks are resolved here instead of by the
//! kernel and cannot leave the layer, and the size and number of entries are limited. Does not
//! commit the layer.
//!
//! Kept: numeric owners up to 65535, permissions with set-id bits (sandboxes mount layers
//! `nosuid`), times, holes and file capabilities. Left out: other attributes, and devices below
//! `/dev`, which each sandbox creates for itself. Refused: any other device, owners above 65535,
//! and paths with `..`. A leading `/` is dropped. Of two entries with the same path the later one
//! wins.

mod entries;
mod paths;

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

use rustix::fs::{self, Mode, OFlags};

use crate::archive::ArchiveError;
use entries::Unpacker;
pub(crate) use paths::lookup_folders;

/// Limits on what an archive may unpack to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Bytes of content, without the holes of sparse files.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 5_000_000 }
    }
}

/// Why an archive cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The archive is malformed or incomplete.
    #[error("the archive cannot be unpacked")]
    Archive(#[from] ArchiveError),
    /// A path is invalid or points outside the image.
    #[error("the archive's entry `{}` points outside the image or has an invalid name", path.display())]
    Path { path: PathBuf },
    /// A device outside `/dev`.
    #[error("the archive's entry `{}` is a device outside /dev", path.display())]
    Device { path: PathBuf },
    /// An owner that does not exist in a sandbox.
    #[error("the archive's entry `{}` belongs to id {id}; sandboxes only have the ids 0 to 65535", path.display())]
    Owner { path: PathBuf, id: u64 },
    /// A hard link to a file that does not exist.
    #[error("the archive's entry `{}` is a hard link to `{}`, which does not exist", path.display(), to.display())]
    Link { path: PathBuf, to: PathBuf },
    /// The archive exceeds a limit.
    #[error("the archive has more than {limit} {unit}")]
    Limit { limit: u64, unit: &'static str },
    /// An entry cannot be written.
    #[error("cannot unpack `{}`", path.display())]
    File { path: PathBuf, source: io::Error },
}

/// Totals of an unpacked archive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Unpacked {
    pub(crate) entries: u64,
    /// Bytes of content, without holes.
    pub(crate) bytes: u64,
    /// Devices below `/dev` that were left out.
    pub(crate) devices: u64,
}

/// How the entries of an archive are interpreted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArchiveForm {
    /// A complete root file system.
    RootFs,
    /// An OCI layer on top of others, with whiteout markers for removed files.
    Layer,
    /// Trees with overlayfs's whiteouts and opaque folders, as `tree_archive` packs them.
    Trees,
}

/// The layer to unpack into.
pub(crate) struct Target<'a> {
    /// The empty folder that becomes the layer.
    pub(crate) layer: &'a Path,
    /// The layers below, top first.
    pub(crate) below: &'a [PathBuf],
    /// The folder that receives folders which a later entry replaces; on the same file system.
    pub(crate) trash: &'a Path,
}

/// Unpacks a whole archive, to the last byte of `source`.
pub(crate) fn unpack(
    source: impl Read,
    form: ArchiveForm,
    target: &Target<'_>,
    limits: UnpackLimits,
) -> Result<Unpacked, UnpackError> {
    let open = |path: &Path| {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::open(path, flags, Mode::empty()).map_err(|e| file_error(path, e))
    };
    let below = target.below.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    Unpacker::new(open(target.layer)?, below, open(target.trash)?, form, limits).unpack_all(source)
}

fn file_error(path: &Path, source: impl Into<io::Error>) -> UnpackError {
    UnpackError::File { path: path.to_owned(), source: source.into() }
}

#[cfg(test)]
mod tests;
