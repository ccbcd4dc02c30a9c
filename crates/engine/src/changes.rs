//! Compares two snapshots file by file, as a process inside would see them: merges layers,
//! whiteouts and opaque folders. Read-only. Skips the content of layers that both snapshots share,
//! so a large image costs nothing. Trees are untrusted: no link is followed, and entries deeper
//! than PATH_MAX are left out and reported as truncated.

use std::{
    ffi::{CStr, CString},
    io::Read,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use harvest_proto::SnapshotId;
use rustix::{
    fs::{FileType, Mode, OFlags, Stat},
    io::Errno,
};

use crate::{Engine, EngineError, Snapshot, disk::Disk, spec::LayerId, tree};

// The maximum number of names to compare: minutes of work.
const MAX_NAMES: usize = 4_000_000;

// The maximum content to read for comparing files of equal size; beyond it, their mtimes decide.
const MAX_COMPARED_BYTES: i64 = 1 << 30;

/// What a snapshot is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Baseline {
    /// Another snapshot.
    Snapshot(SnapshotId),
    /// The disk that the sandbox of this snapshot was started with.
    StartOf(SnapshotId),
}

/// The differences between two snapshots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// The first changes, up to the requested limit, folder by folder.
    pub entries: Vec<Change>,
    /// The number of names that exist only after.
    pub added: u64,
    /// The number of names that differ.
    pub changed: u64,
    /// The number of names that exist only before.
    pub removed: u64,
    /// Whether entries were left out: too deep, too many, or not readable.
    pub truncated: bool,
}

/// A name that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path without the leading slash. May contain any bytes but zero.
    pub path: PathBuf,
    /// How the name differs.
    pub kind: ChangeKind,
    /// The type of the file after, or before if it was removed: `file`, `folder`, `link` or
    /// `other`.
    pub file_type: &'static str,
    /// The size before, of a regular file.
    pub size_before: Option<u64>,
    /// The size after, of a regular file.
    pub size_after: Option<u64>,
}

/// How a name differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The name is new.
    Added,
    /// Content, type, owner or mode differ. A different time alone does not count.
    Changed,
    /// The name no longer exists.
    Removed,
}

impl Engine {
    /// Compares two snapshots; counts all changes and lists the first `limit`.
    ///
    /// # Errors
    /// When a snapshot, or the one it is compared with, does not exist.
    pub fn changes(
        &self,
        before: &Baseline,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<Changes, EngineError> {
        self.store.ensure_mounted()?;
        // Layers must not be removed while they are compared.
        let _gc_lock = self.disk.lock_against_gc()?;
        let find = |id: &SnapshotId| {
            self.disk
                .snapshot(id)?
                .ok_or_else(|| EngineError::SnapshotMissing { snapshot: id.clone() })
        };
        let before = match before {
            Baseline::Snapshot(id) => find(id)?.layers,
            Baseline::StartOf(id) => self.disk.start_layers(&find(id)?)?,
        };
        self.disk.changes(&before, &find(after)?.layers, limit)
    }
}

impl Disk {
    /// The layers that the sandbox of a snapshot was started with.
    fn start_layers(&self, snapshot: &Snapshot) -> Result<Vec<LayerId>, EngineError> {
        if let Some(parent) = &snapshot.parent
            && let Some(parent) = self.snapshot(parent)?
        {
            return Ok(parent.layers);
        }
        match &snapshot.parent {
            // On btrfs the disk started as a clone of its parent, which is not among the layers.
            Some(parent) if self.home.store().is_btrfs() => {
                Err(EngineError::SnapshotMissing { snapshot: parent.clone() })
            }
            _ => Ok(snapshot.layers[..snapshot.base_layers].to_vec()),
        }
    }

    pub(crate) fn changes(
        &self,
        before: &[LayerId],
        after: &[LayerId],
        limit: usize,
    ) -> Result<Changes, EngineError> {
        let shared = before.iter().zip(after).take_while(|(one, other)| one == other).count();
        let mut roots = Vec::new();
        let mut open = |layers: &[LayerId]| {
            let first = roots.len();
            for layer in layers {
                roots.push(tree::open_root(&self.layer_path(layer)?)?);
            }
            // Topmost first.
            Ok::<_, EngineError>((first..roots.len()).rev().collect::<Vec<_>>())
        };
        let common = open(&before[..shared])?;
        let root = FolderPair {
            path: PathBuf::new(),
            before: SideLayers { own: open(&before[shared..])?, sees_common: true },
            after: SideLayers { own: open(&after[shared..])?, sees_common: true },
            common,
        };
        let mut comparison = Comparison {
            roots,
            limit,
            names_left: MAX_NAMES,
            bytes_left: MAX_COMPARED_BYTES,
            changes: Changes::default(),
        };
        comparison.walk(root);
        Ok(comparison.changes)
    }
}

/// The layers of one side at some folder.
#[derive(Debug, Clone, Default)]
struct SideLayers {
    /// The layers of this side only that contain the folder, topmost first.
    own: Vec<usize>,
    /// Whether the common layers show through.
    sees_common: bool,
}

/// A folder to compare.
struct FolderPair {
    path: PathBuf,
    before: SideLayers,
    after: SideLayers,
    common: Vec<usize>,
}

/// The result of looking up a name on one side.
enum Lookup {
    Missing,
    Folder { stat: Stat, side: SideLayers, common: Vec<usize> },
    Other { stat: Stat, layer: usize },
}

impl Lookup {
    fn stat(&self) -> Option<&Stat> {
        match self {
            Self::Missing => None,
            Self::Folder { stat, .. } | Self::Other { stat, .. } => Some(stat),
        }
    }
}

/// The open folders of a [`FolderPair`], by layer.
type OpenLayers = Vec<(usize, OwnedFd)>;

struct Comparison {
    roots: Vec<OwnedFd>,
    limit: usize,
    /// How many names may still be compared.
    names_left: usize,
    /// How much content may still be read.
    bytes_left: i64,
    changes: Changes,
}

impl Comparison {
    // An explicit stack of paths, not of descriptors: an untrusted tree may be thousands deep.
    fn walk(&mut self, root: FolderPair) {
        let mut waiting = vec![root];
        while let Some(pair) = waiting.pop() {
            if self.names_left == 0 {
                self.changes.truncated = true;
                return;
            }
            match self.compare_folder(&pair) {
                // Reversed, so that the stack pops the folders in the order of their names.
                Ok(mut below) => waiting.extend(below.drain(..).rev()),
                Err(_) => self.changes.truncated = true,
            }
        }
    }

    fn compare_folder(&mut self, pair: &FolderPair) -> Result<Vec<FolderPair>, Errno> {
        let open = self.open(pair)?;
        let unequal = pair.before.sees_common != pair.after.sees_common;
        let mut names: Vec<CString> = Vec::new();
        for (layer, folder) in &open {
            if unequal || !pair.common.contains(layer) {
                // A folder may have more names than fit into memory.
                let limit = self.names_left - names.len();
                let (first, complete) = tree::first_names(folder.as_fd(), limit)?;
                names.extend(first);
                self.changes.truncated |= !complete;
            }
        }
        names.sort_unstable();
        names.dedup();
        self.names_left -= names.len();
        let mut below = Vec::new();
        for name in names {
            let before = lookup(&open, &pair.before, &pair.common, &name)?;
            let after = lookup(&open, &pair.after, &pair.common, &name)?;
            let path = tree::join(&pair.path, &name);
            self.compare(&open, &name, &path, &before, &after);
            below.extend(subfolder_pair(path, before, after));
        }
        Ok(below)
    }

    fn open(&self, pair: &FolderPair) -> Result<OpenLayers, Errno> {
        let common =
            if pair.before.sees_common || pair.after.sees_common { &pair.common[..] } else { &[] };
        let layers = pair.before.own.iter().chain(&pair.after.own).chain(common);
        let mut open = Vec::new();
        for &layer in layers {
            open.push((layer, tree::open_folder(self.roots[layer].as_fd(), &pair.path)?));
        }
        Ok(open)
    }

    fn compare(
        &mut self,
        open: &OpenLayers,
        name: &CStr,
        path: &Path,
        before: &Lookup,
        after: &Lookup,
    ) {
        use Lookup::{Folder, Missing, Other};
        let same = match (before, after) {
            (Missing, Missing) => true,
            (Other { stat: one, layer: first }, Other { stat: other, layer: second }) => {
                first == second || self.is_same(open, name, (one, *first), (other, *second))
            }
            (Folder { stat: one, .. }, Folder { stat: other, .. }) => has_same_metadata(one, other),
            _ => false,
        };
        if same {
            return;
        }
        let (kind, count) = match (before, after) {
            (Missing, _) => (ChangeKind::Added, &mut self.changes.added),
            (_, Missing) => (ChangeKind::Removed, &mut self.changes.removed),
            _ => (ChangeKind::Changed, &mut self.changes.changed),
        };
        *count += 1;
        if self.changes.entries.len() >= self.limit {
            self.changes.truncated = true;
            return;
        }
        let Some(stat) = after.stat().or_else(|| before.stat()) else { return };
        self.changes.entries.push(Change {
            path: path.to_owned(),
            kind,
            file_type: match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => "file",
                FileType::Directory => "folder",
                FileType::Symlink => "link",
                _ => "other",
            },
            size_before: before.stat().and_then(size),
            size_after: after.stat().and_then(size),
        });
    }

    fn is_same(
        &mut self,
        open: &OpenLayers,
        name: &CStr,
        one: (&Stat, usize),
        other: (&Stat, usize),
    ) -> bool {
        let ((before, first), (after, second)) = (one, other);
        let contents = |stat: &Stat| (stat.st_rdev, stat.st_size);
        if !has_same_metadata(before, after) || contents(before) != contents(after) {
            return false;
        }
        let changed = |stat: &Stat| (stat.st_ino, stat.st_ctime, stat.st_ctime_nsec);
        // A btrfs clone keeps inode numbers and times.
        if changed(before) == changed(after) {
            return true;
        }
        let (Some(before_in), Some(after_in)) = (folder_in(open, first), folder_in(open, second))
        else {
            return false;
        };
        match FileType::from_raw_mode(before.st_mode) {
            FileType::RegularFile if before.st_size <= self.bytes_left => {
                self.bytes_left -= before.st_size;
                has_same_content(before_in, after_in, name).unwrap_or(false)
            }
            FileType::RegularFile => {
                (before.st_mtime, before.st_mtime_nsec) == (after.st_mtime, after.st_mtime_nsec)
            }
            FileType::Symlink => {
                let target = |folder| rustix::fs::readlinkat(folder, name, Vec::new()).ok();
                target(before_in) == target(after_in)
            }
            _ => true,
        }
    }
}

/// The pair of a subfolder, if its content may differ.
fn subfolder_pair(path: PathBuf, before: Lookup, after: Lookup) -> Option<FolderPair> {
    let parts = |seen| match seen {
        Lookup::Folder { side, common, .. } => (side, common),
        _ => (SideLayers::default(), Vec::new()),
    };
    let ((before, common), (after, other)) = (parts(before), parts(after));
    let untouched =
        before.own.is_empty() && after.own.is_empty() && before.sees_common == after.sees_common;
    let common = if before.sees_common { common } else { other };
    (!untouched).then_some(FolderPair { path, before, after, common })
}

/// Looks up a name on one side: the topmost layer with the name decides; folders are merged.
fn lookup(
    open: &OpenLayers,
    side: &SideLayers,
    common: &[usize],
    name: &CStr,
) -> Result<Lookup, Errno> {
    let mut found: Option<(Stat, SideLayers, Vec<usize>)> = None;
    let through = if side.sees_common { common } else { &[] };
    let own = side.own.iter().map(|layer| (*layer, false));
    let layers = own.chain(through.iter().map(|layer| (*layer, true)));
    let mut hidden = !side.sees_common;
    for (layer, is_common) in layers {
        let Some(folder) = folder_in(open, layer) else { continue };
        let stat = match tree::stat(folder, name) {
            Err(Errno::NOENT) => continue,
            result => result?,
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            match found {
                None if tree::is_whiteout(&stat) => return Ok(Lookup::Missing),
                None => return Ok(Lookup::Other { stat, layer }),
                // A folder above hides this file and all lower layers. In a common layer it does so
                // for both sides.
                Some(_) => {
                    hidden |= !is_common;
                    break;
                }
            }
        }
        let (_, own, shared) =
            found.get_or_insert_with(|| (stat, SideLayers::default(), Vec::new()));
        if is_common {
            shared.push(layer)
        } else {
            own.own.push(layer)
        }
        if tree::is_opaque(tree::open_subfolder(folder, name)?.as_fd())? {
            hidden |= !is_common;
            break;
        }
    }
    Ok(found.map_or(Lookup::Missing, |(stat, mut side, common)| {
        side.sees_common = !hidden;
        Lookup::Folder { stat, side, common }
    }))
}

fn folder_in(open: &OpenLayers, layer: usize) -> Option<BorrowedFd<'_>> {
    open.iter().find(|(of, _)| *of == layer).map(|(_, folder)| folder.as_fd())
}

fn size(stat: &Stat) -> Option<u64> {
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    is_file.then(|| u64::try_from(stat.st_size).unwrap_or(0))
}

fn has_same_metadata(one: &Stat, other: &Stat) -> bool {
    (one.st_mode, one.st_uid, one.st_gid) == (other.st_mode, other.st_uid, other.st_gid)
}

fn has_same_content(
    one: BorrowedFd<'_>,
    other: BorrowedFd<'_>,
    name: &CStr,
) -> std::io::Result<bool> {
    let open = |folder| {
        // Non-blocking, in case the name is a pipe after all.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        rustix::fs::openat(folder, name, flags, Mode::empty()).map(std::fs::File::from)
    };
    let (mut one, mut other) = (open(one)?, open(other)?);
    let (mut first, mut second) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        let read = one.read(&mut first)?;
        if read == 0 {
            return Ok(other.read(&mut second)? == 0);
        }
        if other.read_exact(&mut second[..read]).is_err() || first[..read] != second[..read] {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparing_too_many_names_is_reported_as_truncated() {
        let folder = tempfile::tempdir().unwrap();
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        std::fs::create_dir(&before).unwrap();
        std::fs::create_dir(&after).unwrap();
        for number in 0..100 {
            std::fs::write(after.join(number.to_string()), "").unwrap();
        }
        for (names, added, truncated) in [(40, 40, true), (99, 99, true), (101, 100, false)] {
            let roots = [&before, &after].map(|root| tree::open_root(root).unwrap()).into();
            let side = |layer| SideLayers { own: vec![layer], sees_common: true };
            let (before, after) = (side(0), side(1));
            let root = FolderPair { path: PathBuf::new(), before, after, common: Vec::new() };
            let changes = Changes::default();
            let mut comparison =
                Comparison { roots, limit: 1000, names_left: names, bytes_left: 0, changes };
            comparison.walk(root);
            assert_eq!(
                (comparison.changes.added, comparison.changes.truncated),
                (added, truncated),
                "of {names}"
            );
        }
    }
}
