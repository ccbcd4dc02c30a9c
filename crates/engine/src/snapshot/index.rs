//! The index of a capture: for each folder, the names and the state of each. The next capture
//! compares it with the current tree to find what changed. Stored beside the sandbox in a compact
//! binary format, because a checkout has tens of thousands of names.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
};

use rustix::fs::Stat;

// Changes with the format; an index of another format is ignored.
const MAGIC: &[u8; 8] = b"hvindex2";

// A kernel clock tick is at most 10 ms; within two ticks, two changes may get the same ctime.
const RACY_NANOS: i64 = 20_000_000;

// Replaces a ctime that is too recent to prove anything; never equal to a real ctime.
const UNTRUSTED: i64 = i64::MIN;

/// The type of a directory entry, as far as a capture distinguishes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Folder,
    OpaqueFolder,
    Whiteout,
    Other,
}

impl EntryKind {
    pub(crate) fn is_folder(self) -> bool {
        matches!(self, Self::Folder | Self::OpaqueFolder)
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Folder, Self::OpaqueFolder, Self::Whiteout, Self::Other]
            .get(usize::from(byte))
            .copied()
    }
}

/// The state of a name at the time of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    pub(crate) kind: EntryKind,
    pub(crate) inode: u64,
    ctime: i64,
}

impl IndexEntry {
    /// The state seen by a capture at `captured_at`, in nanoseconds since 1970.
    pub(crate) fn of(stat: &Stat, kind: EntryKind, captured_at: i64) -> Self {
        let ctime = ctime_nanos(stat);
        let racy = ctime >= captured_at.saturating_sub(RACY_NANOS);
        Self { kind, inode: stat.st_ino, ctime: if racy { UNTRUSTED } else { ctime } }
    }

    /// The same entry, which the next capture always treats as changed.
    pub(crate) fn untrusted(self) -> Self {
        Self { ctime: UNTRUSTED, ..self }
    }

    /// Whether `stat` proves that the entry has not changed since.
    pub(crate) fn is_unchanged(&self, stat: &Stat, kind: EntryKind) -> bool {
        self.kind == kind && self.inode == stat.st_ino && self.ctime == ctime_nanos(stat)
    }
}

fn ctime_nanos(stat: &Stat) -> i64 {
    let nanos = i64::try_from(stat.st_ctime_nsec).unwrap_or(0);
    stat.st_ctime.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// The entries of one folder, sorted by name.
pub(crate) type FolderEntries = Vec<(CString, IndexEntry)>;

/// The key of the root folder; no inode has this number.
pub(crate) const ROOT: u64 = 0;

/// What a capture saw, keyed by the folders' inodes: keyed by paths, a deep tree would take
/// quadratic space.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    folders: HashMap<u64, FolderEntries>,
    /// Folders that were inserted twice: they were moved during the walk.
    duplicates: Vec<u64>,
}

impl Index {
    /// The entries of the folder with this inode, if the capture saw it.
    pub(crate) fn folder(&self, inode: u64) -> Option<&FolderEntries> {
        self.folders.get(&inode)
    }

    /// Whether the index has no folder at all, not even an empty root.
    pub(crate) fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// Adds a folder. `entries` must be sorted by name.
    pub(crate) fn insert(&mut self, inode: u64, entries: FolderEntries) {
        if self.folders.insert(inode, entries).is_some() {
            self.duplicates.push(inode);
        }
    }

    /// Removes folders that were seen twice: the index cannot tell which copy its entries describe.
    pub(crate) fn remove_duplicates(&mut self) {
        for inode in std::mem::take(&mut self.duplicates) {
            self.folders.remove(&inode);
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for (folder, names) in &self.folders {
            out.extend(folder.to_le_bytes());
            out.extend(u32::try_from(names.len()).expect("a folder has fewer names").to_le_bytes());
            for (name, entry) in names {
                write_name(&mut out, name.to_bytes());
                out.push(entry.kind as u8);
                out.extend(entry.inode.to_le_bytes());
                out.extend(entry.ctime.to_le_bytes());
            }
        }
        out
    }

    /// Decodes an index; `None` when the bytes are invalid, which only makes the next capture a
    /// full copy.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let mut folders = HashMap::new();
        while !rest.is_empty() {
            let folder = u64::from_le_bytes(take_array(&mut rest)?);
            let count = u32::from_le_bytes(take_array(&mut rest)?);
            let mut names = FolderEntries::new();
            for _ in 0..count {
                let name = CString::new(take_name(&mut rest)?).ok()?;
                let [kind] = take_array(&mut rest)?;
                let inode = u64::from_le_bytes(take_array(&mut rest)?);
                let ctime = i64::from_le_bytes(take_array(&mut rest)?);
                names.push((name, IndexEntry { kind: EntryKind::from_byte(kind)?, inode, ctime }));
            }
            folders.insert(folder, names);
        }
        Some(Self { folders, duplicates: Vec::new() })
    }
}

/// The entry of `name` in a folder.
pub(crate) fn find<'a>(entries: &'a FolderEntries, name: &CStr) -> Option<&'a IndexEntry> {
    let found = entries.binary_search_by(|(candidate, _)| candidate.as_c_str().cmp(name)).ok()?;
    Some(&entries[found].1)
}

fn write_name(out: &mut Vec<u8>, text: &[u8]) {
    out.extend(u16::try_from(text.len()).expect("a name has at most 255 bytes").to_le_bytes());
    out.extend(text);
}

fn take_name<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u16::from_le_bytes(take_array(rest)?);
    let (text, tail) = rest.split_at_checked(usize::from(length))?;
    *rest = tail;
    Some(text)
}

fn take_array<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat_of(path: &std::path::Path) -> Stat {
        rustix::fs::lstat(path).unwrap()
    }

    #[test]
    fn decode_restores_an_index_and_rejects_garbage() {
        let mut index = Index::default();
        let entry = IndexEntry { kind: EntryKind::OpaqueFolder, inode: 7, ctime: -3 };
        index.insert(ROOT, vec![(c"a\xff".to_owned(), entry)]);
        index.insert(7, Vec::new());
        let bytes = index.encode();
        assert_eq!(Index::decode(&bytes), Some(index));
        assert_eq!(Index::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Index::decode(b"something else"), None);
    }

    #[test]
    fn recent_ctimes_are_not_trusted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stat = stat_of(file.path());
        let ctime = ctime_nanos(&stat);
        let is_unchanged = |captured_at| {
            IndexEntry::of(&stat, EntryKind::Other, captured_at)
                .is_unchanged(&stat, EntryKind::Other)
        };
        assert!(is_unchanged(ctime + RACY_NANOS + 1));
        assert!(!is_unchanged(ctime + RACY_NANOS));
        // The clock was set back: the ctime is in the future.
        assert!(!is_unchanged(ctime - 1_000_000_000));
    }
}
