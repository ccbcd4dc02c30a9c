//! Unpacks an archive into a layer. The archive is hostile: every step goes through descriptors below
//! the layer's root, a link is followed only in our own book-keeping and never leads out, and size and
//! number are limited. Makes no layer of what it unpacked; see `build`.
//!
//! What is kept: numeric owners up to 65535, permissions with their set-id bits (no mount of ours honours
//! those), times, holes, file capabilities. What is not: other attributes, and devices below `/dev`, where
//! each sandbox has its own. A device elsewhere, an owner no sandbox has and a path with `..` are refused.
//! A leading `/` is dropped. Of two entries with one path the later one stays.

mod entries;
mod place;

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

use rustix::fs::{self, Mode, OFlags};

use crate::archive::ArchiveError;
use entries::Unpacker;

/// How much an archive may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Bytes of content, without the holes of sparse files.
    pub bytes: u64,
    /// Entries.
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
    /// It is no archive, or not a whole one.
    #[error("the archive cannot be unpacked")]
    Archive(#[from] ArchiveError),
    /// A path leads out, or is none.
    #[error("the archive's entry `{}` leads out of the image or has no usable name", path.display())]
    Path {
        /// The entry.
        path: PathBuf,
    },
    /// A device where a sandbox has none of its own.
    #[error("the archive's entry `{}` is a device; only those below /dev are left out silently", path.display())]
    Device {
        /// The entry.
        path: PathBuf,
    },
    /// An owner no sandbox has.
    #[error("the archive's entry `{}` belongs to id {id}; sandboxes have the ids 0 to 65535", path.display())]
    Owner {
        /// The entry.
        path: PathBuf,
        /// Its owner or group.
        id: u64,
    },
    /// A hard link to nothing.
    #[error("the archive's entry `{}` is a link to `{}`, which is not there", path.display(), to.display())]
    Link {
        /// The entry.
        path: PathBuf,
        /// What it is to be another name of.
        to: PathBuf,
    },
    /// More than was allowed.
    #[error("the archive has more than {limit} {unit}")]
    Limit {
        /// How many.
        limit: u64,
        /// Of what.
        unit: &'static str,
    },
    /// The disk said no.
    #[error("cannot unpack `{}`", path.display())]
    File {
        /// The entry.
        path: PathBuf,
        /// What was said.
        source: io::Error,
    },
}

/// What came out of an archive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Unpacked {
    /// Entries.
    pub(crate) entries: u64,
    /// Bytes of content, without holes.
    pub(crate) bytes: u64,
    /// Devices below `/dev` that were left out.
    pub(crate) devices: u64,
}

/// What an archive is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A root file system.
    Tree,
    /// A layer on top of others, with marks for what is gone.
    Layer,
}

/// Where to unpack.
pub(crate) struct Target<'a> {
    /// The empty folder that becomes the layer.
    pub(crate) layer: &'a Path,
    /// The layers below, top first.
    pub(crate) below: &'a [PathBuf],
    /// Where folders go that a later entry replaces; on the same file system.
    pub(crate) trash: &'a Path,
}

/// Unpacks a whole archive, to the last byte of `source`.
pub(crate) fn unpack(
    source: impl Read,
    form: Form,
    target: &Target<'_>,
    limits: UnpackLimits,
) -> Result<Unpacked, UnpackError> {
    let opened = |path: &Path| {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::open(path, flags, Mode::empty()).map_err(|e| file_error(path, e))
    };
    let below = target.below.iter().map(|path| opened(path)).collect::<Result<Vec<_>, _>>()?;
    Unpacker::new(opened(target.layer)?, below, opened(target.trash)?, form, limits).all(source)
}

fn file_error(path: &Path, source: impl Into<io::Error>) -> UnpackError {
    UnpackError::File { path: path.to_owned(), source: source.into() }
}

#[cfg(test)]
mod tests;
