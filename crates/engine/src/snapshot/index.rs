//! What the last capture of a sandbox saw: per folder, the names and how each stood. Compared with
//! what is there now it tells what to copy. Kept beside the sandbox in a compact form of its own,
//! because a checkout has tens of thousands of names.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
};

use rustix::fs::Stat;

// Changed when the form changes: an index of another form is as good as none.
const MAGIC: &[u8; 8] = b"hvindex2";

// A clock tick of the kernel is 10 ms at most; within two of them a second change may carry the
// same time as the first.
const RACY_NANOS: i64 = 20_000_000;

// Stands for a time that proves nothing: never equal to a real one.
const UNTRUSTED: i64 = i64::MIN;

/// What a name was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Folder,
    OpaqueFolder,
    /// "Nothing is here."
    Whiteout,
    Other,
}

impl Kind {
    pub(crate) fn is_folder(self) -> bool {
        matches!(self, Self::Folder | Self::OpaqueFolder)
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Folder, Self::OpaqueFolder, Self::Whiteout, Self::Other]
            .get(usize::from(byte))
            .copied()
    }
}

/// How a name stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) inode: u64,
    changed: i64,
}

impl Entry {
    /// How a name stands at the time `taken`, in nanoseconds since 1970.
    pub(crate) fn of(stat: &Stat, kind: Kind, taken: i64) -> Self {
        let changed = nanos(stat);
        let racy = changed >= taken.saturating_sub(RACY_NANOS);
        Self { kind, inode: stat.st_ino, changed: if racy { UNTRUSTED } else { changed } }
    }

    /// The same, proving nothing.
    pub(crate) fn doubted(self) -> Self {
        Self { changed: UNTRUSTED, ..self }
    }

    /// Whether `stat` proves that nothing has changed since.
    pub(crate) fn still(&self, stat: &Stat, kind: Kind) -> bool {
        self.kind == kind && self.inode == stat.st_ino && self.changed == nanos(stat)
    }
}

fn nanos(stat: &Stat) -> i64 {
    let nanos = i64::try_from(stat.st_ctime_nsec).unwrap_or(0);
    stat.st_ctime.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// The names of one folder, sorted.
pub(crate) type Names = Vec<(CString, Entry)>;

/// Stands for the folder a walk starts at: no inode has this number.
pub(crate) const ROOT: u64 = 0;

/// What a capture saw, by the folders' inodes: a path for each would make a deep tree take the square
/// of its depth.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    folders: HashMap<u64, Names>,
    /// Folders met twice: moved while we looked.
    doubtful: Vec<u64>,
}

impl Index {
    /// What the folder with this inode held; `None` when there was none.
    pub(crate) fn folder(&self, inode: u64) -> Option<&Names> {
        self.folders.get(&inode)
    }

    /// Whether nothing was seen, not even an empty root.
    pub(crate) fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// Remembers what the folder with this inode holds. `names` must be sorted.
    pub(crate) fn insert(&mut self, inode: u64, names: Names) {
        if self.folders.insert(inode, names).is_some() {
            self.doubtful.push(inode);
        }
    }

    /// Forgets folders that were met twice: which of their two copies was remembered, nobody knows.
    pub(crate) fn forget_doubtful(&mut self) {
        for inode in std::mem::take(&mut self.doubtful) {
            self.folders.remove(&inode);
        }
    }

    /// The index as bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for (folder, names) in &self.folders {
            out.extend(folder.to_le_bytes());
            out.extend(u32::try_from(names.len()).expect("a folder has fewer names").to_le_bytes());
            for (name, entry) in names {
                put(&mut out, name.to_bytes());
                out.push(entry.kind as u8);
                out.extend(entry.inode.to_le_bytes());
                out.extend(entry.changed.to_le_bytes());
            }
        }
        out
    }

    /// The index these bytes are; `None` when they are none, which costs a full copy and no more.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let mut folders = HashMap::new();
        while !rest.is_empty() {
            let folder = u64::from_le_bytes(take_array(&mut rest)?);
            let count = u32::from_le_bytes(take_array(&mut rest)?);
            let mut names = Names::new();
            for _ in 0..count {
                let name = CString::new(take(&mut rest)?).ok()?;
                let [kind] = take_array(&mut rest)?;
                let inode = u64::from_le_bytes(take_array(&mut rest)?);
                let changed = i64::from_le_bytes(take_array(&mut rest)?);
                names.push((name, Entry { kind: Kind::from_byte(kind)?, inode, changed }));
            }
            folders.insert(folder, names);
        }
        Some(Self { folders, doubtful: Vec::new() })
    }
}

/// How `name` stood, if it was there.
pub(crate) fn find<'a>(names: &'a Names, name: &CStr) -> Option<&'a Entry> {
    let found = names.binary_search_by(|(candidate, _)| candidate.as_c_str().cmp(name)).ok()?;
    Some(&names[found].1)
}

fn put(out: &mut Vec<u8>, text: &[u8]) {
    out.extend(u16::try_from(text.len()).expect("a name has at most 255 bytes").to_le_bytes());
    out.extend(text);
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
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
    fn an_index_survives_writing_and_reading_and_garbage_is_none() {
        let mut index = Index::default();
        let entry = Entry { kind: Kind::OpaqueFolder, inode: 7, changed: -3 };
        index.insert(ROOT, vec![(c"a\xff".to_owned(), entry)]);
        index.insert(7, Vec::new());
        let bytes = index.encode();
        assert_eq!(Index::decode(&bytes), Some(index));
        assert_eq!(Index::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Index::decode(b"something else"), None);
    }

    #[test]
    fn a_change_just_before_the_capture_proves_nothing_later() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stat = stat_of(file.path());
        let changed = nanos(&stat);
        assert!(Entry::of(&stat, Kind::Other, changed + RACY_NANOS + 1).still(&stat, Kind::Other));
        assert!(!Entry::of(&stat, Kind::Other, changed + RACY_NANOS).still(&stat, Kind::Other));
        // A clock that was set back: the change lies in the future.
        assert!(!Entry::of(&stat, Kind::Other, changed - 1_000_000_000).still(&stat, Kind::Other));
    }
}
