//! What differs between two snapshots, file by file, as somebody inside would see it: layers, whiteouts
//! and opaque folders are looked through. Reads only. Nothing below what both have in common is looked
//! at, so that a gigabyte of image costs nothing. Trees are hostile: no link is followed, and what lies
//! deeper than a path can say is left out and told.

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

// Walked names at most: minutes of work, and more than any report is read for.
const MOST_NAMES: usize = 4_000_000;

// So much is read to tell whether files of one size differ; then their times have to do.
const MOST_BYTES: i64 = 1 << 30;

/// What a comparison begins from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Before {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// What the sandbox of this snapshot began as.
    BeginningOf(SnapshotId),
}

/// What differs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// The first of them, folder by folder.
    pub entries: Vec<Change>,
    /// How many there are only after.
    pub added: u64,
    /// How many differ.
    pub changed: u64,
    /// How many there were only before.
    pub removed: u64,
    /// Whether something was left out: too deep, too much, or not to be read.
    pub cut: bool,
}

/// A file, folder or other name that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Where, without the leading slash. Any bytes but zero.
    pub path: PathBuf,
    /// How.
    pub how: How,
    /// What it is, or was: `file`, `folder`, `link` or `other`.
    pub kind: &'static str,
    /// The size of the file before.
    pub before: Option<u64>,
    /// The size of the file after.
    pub after: Option<u64>,
}

/// How a name differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It is new.
    Added,
    /// Its content, kind, owner or mode is another. A time alone is no change.
    Changed,
    /// It is gone.
    Removed,
}

impl Engine {
    /// What differs between two snapshots, and the first `limit` of it one by one.
    ///
    /// # Errors
    /// When a snapshot or what it began as is not there.
    pub fn changes(
        &self,
        before: &Before,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<Changes, EngineError> {
        self.store.wake()?;
        // What is compared stays until it is.
        let _hold = self.disk.hold()?;
        let find = |id: &SnapshotId| {
            self.disk
                .snapshot(id)?
                .ok_or_else(|| EngineError::SnapshotMissing { snapshot: id.clone() })
        };
        let before = match before {
            Before::Snapshot(id) => find(id)?.layers,
            Before::BeginningOf(id) => self.disk.beginning_of(&find(id)?)?,
        };
        self.disk.changes(&before, &find(after)?.layers, limit)
    }
}

impl Disk {
    /// The layers the sandbox of a snapshot began as.
    fn beginning_of(&self, snapshot: &Snapshot) -> Result<Vec<LayerId>, EngineError> {
        if let Some(parent) = &snapshot.parent
            && let Some(parent) = self.snapshot(parent)?
        {
            return Ok(parent.layers);
        }
        match (&snapshot.parent, snapshot.stands_on) {
            // On btrfs the disk began as a clone of its parent, which is not among the layers.
            (Some(parent), _) if self.store().is_btrfs() => {
                Err(EngineError::SnapshotMissing { snapshot: parent.clone() })
            }
            (_, Some(count)) if count <= snapshot.layers.len() => {
                Ok(snapshot.layers[..count].to_vec())
            }
            _ => Err(EngineError::Invalid {
                reason: format!("nobody noted what the sandbox of {} began as", snapshot.id),
            }),
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
        let root = Place {
            path: PathBuf::new(),
            before: Side { own: open(&before[shared..])?, sees: true },
            after: Side { own: open(&after[shared..])?, sees: true },
            common,
        };
        let mut comparison = Comparison {
            roots,
            limit,
            names: MOST_NAMES,
            bytes: MOST_BYTES,
            changes: Changes::default(),
        };
        comparison.walk(root);
        Ok(comparison.changes)
    }
}

/// One of the two at some folder.
#[derive(Debug, Clone, Default)]
struct Side {
    /// The layers of its own that have the folder, topmost first.
    own: Vec<usize>,
    /// Whether what both have in common shows through.
    sees: bool,
}

/// A folder to be compared.
struct Place {
    path: PathBuf,
    before: Side,
    after: Side,
    common: Vec<usize>,
}

/// What a name is on one side.
enum Seen {
    Nothing,
    Folder { stat: Stat, side: Side, common: Vec<usize> },
    Other { stat: Stat, layer: usize },
}

impl Seen {
    fn stat(&self) -> Option<&Stat> {
        match self {
            Self::Nothing => None,
            Self::Folder { stat, .. } | Self::Other { stat, .. } => Some(stat),
        }
    }
}

/// The folders of a place, by layer.
type Open = Vec<(usize, OwnedFd)>;

struct Comparison {
    roots: Vec<OwnedFd>,
    limit: usize,
    /// How many names may still be looked at.
    names: usize,
    /// What may still be read.
    bytes: i64,
    changes: Changes,
}

impl Comparison {
    // An explicit stack of paths rather than of descriptors: a hostile tree may be thousands deep.
    fn walk(&mut self, root: Place) {
        let mut waiting = vec![root];
        while let Some(place) = waiting.pop() {
            if self.names == 0 {
                self.changes.cut = true;
                return;
            }
            match self.folder(&place) {
                // In the order of names, though the last is taken first.
                Ok(mut below) => waiting.extend(below.drain(..).rev()),
                Err(_) => self.changes.cut = true,
            }
        }
    }

    fn folder(&mut self, place: &Place) -> Result<Vec<Place>, Errno> {
        let open = self.open(place)?;
        let unequal = place.before.sees != place.after.sees;
        let mut names: Vec<CString> = Vec::new();
        for (layer, folder) in &open {
            if unequal || !place.common.contains(layer) {
                // One folder may hold more than there is memory for: those that come first have to do.
                let room = self.names - names.len();
                let (some, all) = tree::first_names(folder.as_fd(), room)?;
                names.extend(some);
                self.changes.cut |= !all;
            }
        }
        names.sort_unstable();
        names.dedup();
        self.names -= names.len();
        let mut below = Vec::new();
        for name in names {
            let before = look(&open, &place.before, &place.common, &name)?;
            let after = look(&open, &place.after, &place.common, &name)?;
            let path = tree::join(&place.path, &name);
            self.compare(&open, &name, &path, &before, &after);
            below.extend(deeper(path, before, after));
        }
        Ok(below)
    }

    fn open(&self, place: &Place) -> Result<Open, Errno> {
        let common = if place.before.sees || place.after.sees { &place.common[..] } else { &[] };
        let layers = place.before.own.iter().chain(&place.after.own).chain(common);
        let mut open = Vec::new();
        for &layer in layers {
            open.push((layer, tree::open_folder(self.roots[layer].as_fd(), &place.path)?));
        }
        Ok(open)
    }

    fn compare(&mut self, open: &Open, name: &CStr, path: &Path, before: &Seen, after: &Seen) {
        let how = match (before, after) {
            (Seen::Nothing, Seen::Nothing) => return,
            (Seen::Nothing, _) => How::Added,
            (_, Seen::Nothing) => How::Removed,
            (
                Seen::Other { stat: one, layer: first },
                Seen::Other { stat: other, layer: second },
            ) => {
                if first == second || self.is_same(open, name, (one, *first), (other, *second)) {
                    return;
                }
                How::Changed
            }
            (Seen::Folder { stat: one, .. }, Seen::Folder { stat: other, .. }) => {
                if has_same_owner(one, other) {
                    return;
                }
                How::Changed
            }
            _ => How::Changed,
        };
        match how {
            How::Added => self.changes.added += 1,
            How::Changed => self.changes.changed += 1,
            How::Removed => self.changes.removed += 1,
        }
        if self.changes.entries.len() >= self.limit {
            self.changes.cut = true;
            return;
        }
        let Some(stat) = after.stat().or_else(|| before.stat()) else { return };
        self.changes.entries.push(Change {
            path: path.to_owned(),
            how,
            kind: match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => "file",
                FileType::Directory => "folder",
                FileType::Symlink => "link",
                _ => "other",
            },
            before: before.stat().and_then(size),
            after: after.stat().and_then(size),
        });
    }

    fn is_same(
        &mut self,
        open: &Open,
        name: &CStr,
        one: (&Stat, usize),
        other: (&Stat, usize),
    ) -> bool {
        let ((before, first), (after, second)) = (one, other);
        if !has_same_owner(before, after)
            || before.st_rdev != after.st_rdev
            || before.st_size != after.st_size
        {
            return false;
        }
        let changed = |stat: &Stat| (stat.st_ino, stat.st_ctime, stat.st_ctime_nsec);
        // A clone on btrfs keeps the inode and its times.
        if changed(before) == changed(after) {
            return true;
        }
        let (Some(before_in), Some(after_in)) = (of(open, first), of(open, second)) else {
            return false;
        };
        match FileType::from_raw_mode(before.st_mode) {
            FileType::RegularFile if before.st_size <= self.bytes => {
                self.bytes -= before.st_size;
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

/// The folder of this name, where it must be looked into.
fn deeper(path: PathBuf, before: Seen, after: Seen) -> Option<Place> {
    let parts = |seen| match seen {
        Seen::Folder { side, common, .. } => (side, common),
        _ => (Side::default(), Vec::new()),
    };
    let ((before, common), (after, other)) = (parts(before), parts(after));
    let untouched = before.own.is_empty() && after.own.is_empty() && before.sees == after.sees;
    let common = if before.sees { common } else { other };
    (!untouched).then_some(Place { path, before, after, common })
}

/// What a name is on one side: the first layer that has it decides, and folders of several are one.
fn look(open: &Open, side: &Side, common: &[usize], name: &CStr) -> Result<Seen, Errno> {
    let mut found: Option<(Stat, Side, Vec<usize>)> = None;
    let through = if side.sees { common } else { &[] };
    let layers = side
        .own
        .iter()
        .map(|layer| (*layer, false))
        .chain(through.iter().map(|layer| (*layer, true)));
    let mut cut = !side.sees;
    for (layer, is_common) in layers {
        let Some(folder) = of(open, layer) else { continue };
        let stat = match tree::stat(folder, name) {
            Err(Errno::NOENT) => continue,
            result => result?,
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            match found {
                None if tree::is_whiteout(&stat) => return Ok(Seen::Nothing),
                None => return Ok(Seen::Other { stat, layer }),
                // Hidden by the folder above it, with everything below; and so for both where both see it.
                Some(_) => {
                    cut |= !is_common;
                    break;
                }
            }
        }
        let (_, own, shared) = found.get_or_insert_with(|| (stat, Side::default(), Vec::new()));
        if is_common {
            shared.push(layer)
        } else {
            own.own.push(layer)
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let inner = rustix::fs::openat(folder, name, flags, Mode::empty())?;
        if tree::is_opaque(inner.as_fd())? {
            cut |= !is_common;
            break;
        }
    }
    Ok(found.map_or(Seen::Nothing, |(stat, mut side, common)| {
        side.sees = !cut;
        Seen::Folder { stat, side, common }
    }))
}

fn of(open: &Open, layer: usize) -> Option<BorrowedFd<'_>> {
    open.iter().find(|(of, _)| *of == layer).map(|(_, folder)| folder.as_fd())
}

fn size(stat: &Stat) -> Option<u64> {
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    is_file.then(|| u64::try_from(stat.st_size).unwrap_or(0))
}

fn has_same_owner(one: &Stat, other: &Stat) -> bool {
    (one.st_mode, one.st_uid, one.st_gid) == (other.st_mode, other.st_uid, other.st_gid)
}

fn has_same_content(
    one: BorrowedFd<'_>,
    other: BorrowedFd<'_>,
    name: &CStr,
) -> std::io::Result<bool> {
    let open = |folder| {
        // Not to wait should it have become a pipe, which in an immutable layer it cannot.
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
    fn a_folder_of_more_names_than_are_looked_at_is_cut_and_told() {
        let folder = tempfile::tempdir().unwrap();
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        std::fs::create_dir(&before).unwrap();
        std::fs::create_dir(&after).unwrap();
        for number in 0..100 {
            std::fs::write(after.join(number.to_string()), "").unwrap();
        }
        for (names, added, cut) in [(40, 40, true), (99, 99, true), (101, 100, false)] {
            let roots = [&before, &after].map(|root| tree::open_root(root).unwrap()).into();
            let side = |layer| Side { own: vec![layer], sees: true };
            let (before, after) = (side(0), side(1));
            let root = Place { path: PathBuf::new(), before, after, common: Vec::new() };
            let changes = Changes::default();
            let mut comparison = Comparison { roots, limit: 1000, names, bytes: 0, changes };
            comparison.walk(root);
            assert_eq!(
                (comparison.changes.added, comparison.changes.cut),
                (added, cut),
                "of {names}"
            );
        }
    }
}
