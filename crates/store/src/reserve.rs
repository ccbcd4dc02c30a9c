//! Disk space that is reserved beside the SQLite file, so that work can be ended, deleted and
//! started on a full disk. While the disk is full, requests that make the database grow are
//! refused, and only those that end or delete work or start the server get reserved space, in
//! slices: a program that fills the disk meanwhile takes one slice, not all. PostgreSQL has its
//! own disk.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

// A start writes about a megabyte, a deletion about a hundredth of the history that it deletes.
const RESERVED_BYTES: u64 = 32 << 20;

// More than one group of writes. With less free the disk counts as full.
const SLICE_BYTES: u64 = 8 << 20;

// Space is reserved again only while as much as this remains free.
const FREE_BYTES: u64 = RESERVED_BYTES + 2 * SLICE_BYTES;

/// What happens to a request while the disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnFullDisk {
    /// It makes the database grow: it is refused.
    Refuse,
    /// It is tried in the space that is left. A running sandbox can cause any number of these.
    Try,
    /// It ends or deletes work or starts the server: reserved space is released for it.
    UseReserve,
}

/// The file that takes the space.
#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    /// What the file takes; `None` when the disk is too small or its file system cannot reserve
    /// space. Then nothing is refused.
    held: Option<u64>,
}

impl Reserve {
    /// Reserves the space for a database file; on a full disk, makes room for a start.
    pub(crate) fn open(database: &Path) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push(".reserve");
        let path = PathBuf::from(path);
        let held = path.metadata().ok().map(|found| found.blocks() * 512);
        let mut reserve = Self { path, held };
        if held.is_none() && reserve.free_bytes() >= FREE_BYTES + RESERVED_BYTES {
            reserve.hold();
        }
        reserve.make_room();
        reserve
    }

    /// Whether the database may grow: the disk has room, and all of the space is reserved.
    pub(crate) fn allows_growth(&mut self) -> bool {
        let Some(held) = self.held else { return true };
        let free = self.free_bytes();
        if held < RESERVED_BYTES && free >= FREE_BYTES {
            self.hold();
        }
        free >= SLICE_BYTES && self.held.is_none_or(|held| held >= RESERVED_BYTES)
    }

    /// Releases a slice if the disk is full.
    pub(crate) fn make_room(&mut self) {
        let Some(held) = self.held.filter(|held| *held > 0) else { return };
        if self.free_bytes() >= SLICE_BYTES {
            return;
        }
        let left = held.saturating_sub(SLICE_BYTES);
        match File::options().write(true).open(&self.path).and_then(|file| file.set_len(left)) {
            Ok(()) => {
                tracing::warn!(left, "the disk is full; used some of the reserved disk space");
                self.held = Some(left);
            }
            Err(error) => tracing::error!(%error, "cannot release the reserved disk space"),
        }
    }

    fn free_bytes(&self) -> u64 {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        // An unreadable disk is not a full one; the write reports its error.
        statvfs(folder).map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    fn hold(&mut self) {
        match allocate(&self.path) {
            Ok(()) => self.held = Some(RESERVED_BYTES),
            Err(error) => {
                tracing::warn!(%error, "cannot reserve disk space");
                // Without the file nothing is ever refused.
                if self.held.is_none() {
                    let _ = std::fs::remove_file(&self.path);
                }
            }
        }
    }
}

fn allocate(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    Ok(fallocate(&file, FallocateFlags::empty(), 0, RESERVED_BYTES)?)
}
