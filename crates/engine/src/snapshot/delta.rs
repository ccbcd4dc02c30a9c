//! Copies what changed in a writable layer since its last capture into a new layer, so that the
//! lower layers, the earlier copies and this copy together show the same tree as the original.
//!
//! The rules for a name in a folder that the last capture also saw:
//! - changed (other inode, ctime or kind): copied; a copy hides the lower layers;
//! - removed: a whiteout, since the earlier copy would show through otherwise;
//! - a folder that became opaque: copied in full and marked opaque. A folder that was opaque
//!   already is *not* marked again: that would hide the earlier copies it relies on. The first of
//!   these copies is opaque and hides the lower layers.
//!
//! Large changes are copied in two passes: the first while the sandbox runs ([`Pass::First`]), the
//! second while it is frozen ([`Pass::Second`]), which repeats what changed in between. The
//! index of the first pass lists exactly what that pass put into the copy of a folder, by the
//! folder's inode. The second pass reuses a copied name only if inode and ctime equal those that
//! the first pass read *before* copying it, so no race with the first pass can leave a wrong copy.

use std::{
    ffi::{CStr, CString, OsStr},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, FileType, Mode, Stat},
    io::Errno,
};

use super::index::{self, EntryKind, FolderEntries, Index, IndexEntry};
use crate::{
    EngineError,
    error::AtPath,
    trash,
    tree::{self, Copier, DirStack},
};

/// What a copy wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CopyStats {
    /// FolderEntries written, whiteouts included.
    pub(crate) names: u64,
    /// Bytes of content.
    pub(crate) bytes: u64,
}

/// What to copy: everything that differs from `previous`, from `source` into `target`.
#[derive(Clone, Copy)]
pub(crate) struct Delta<'a> {
    pub(crate) source: &'a Path,
    /// Empty, but for the second pass.
    pub(crate) target: &'a Path,
    pub(crate) previous: &'a Index,
}

#[derive(Clone, Copy)]
pub(crate) enum Pass<'a> {
    /// A single pass that stops beyond this many bytes and leaves a partial copy then.
    Only { max_bytes: u64 },
    /// Copies while the source may change. The index is only valid for the second pass.
    First,
    /// Updates the copy of a first pass, which had this index, to the current source.
    Second(&'a Index),
}

pub(crate) type Heartbeat<'a> = dyn FnMut() -> Result<(), EngineError> + 'a;

impl Delta<'_> {
    /// Copies, and returns the index of the source; `None` beyond the limit of [`Pass::Only`].
    /// `captured_at` is when the source was frozen, in nanoseconds since 1970.
    pub(crate) fn copy(
        self,
        pass: Pass<'_>,
        captured_at: i64,
        heartbeat: &mut Heartbeat<'_>,
    ) -> Result<Option<(Index, CopyStats)>, EngineError> {
        let (from, to) = (tree::open_root(self.source)?, tree::open_root(self.target)?);
        let mut copy = DeltaCopy {
            root: self.source,
            at: PathBuf::new(),
            previous: self.previous,
            pass,
            captured_at,
            source: DirStack::new(from.as_fd()).at("open the folder", self.source)?,
            target: DirStack::new(to.as_fd()).at("open the folder", self.target)?,
            copier: Copier::new(to.as_fd(), heartbeat),
            ancestors: Vec::new(),
            index: Index::default(),
            names: 0,
            over_limit: false,
        };
        copy.walk()?;
        if matches!(pass, Pass::First) {
            copy.index.remove_duplicates();
        }
        let copied = CopyStats { names: copy.names, bytes: copy.copier.bytes };
        Ok((!copy.over_limit).then_some((copy.index, copied)))
    }

    /// [`Delta::copy`] for a pass without a limit.
    pub(crate) fn copy_all(
        self,
        pass: Pass<'_>,
        captured_at: i64,
        heartbeat: &mut Heartbeat<'_>,
    ) -> Result<(Index, CopyStats), EngineError> {
        Ok(self.copy(pass, captured_at, heartbeat)?.unwrap_or_default())
    }
}

impl Pass<'_> {
    /// A single pass that copies everything.
    pub(crate) const ALL: Self = Self::Only { max_bytes: u64::MAX };
}

struct DeltaCopy<'a> {
    root: &'a Path,
    /// The folder being walked, below `root`.
    at: PathBuf,
    previous: &'a Index,
    pass: Pass<'a>,
    captured_at: i64,
    source: DirStack,
    /// May be less deep than `source`: folders are created only when something below is copied.
    target: DirStack,
    copier: Copier<'a>,
    /// The folders from the root to the one being walked.
    ancestors: Vec<FolderFrame>,
    index: Index,
    names: u64,
    over_limit: bool,
}

/// A folder on the path from the root to the one being walked.
struct FolderFrame {
    name: CString,
    stat: Stat,
    /// The inode the last capture saw here. `None` where no earlier copy shows through, so that
    /// everything inside is copied.
    before: Option<u64>,
    /// The inode the first pass copied here, if it did.
    seen: Option<u64>,
    /// Whether the copy is marked opaque.
    opaque: bool,
}

enum WalkStep {
    Enter(Box<FolderFrame>, /* the folder itself has changed */ bool),
    Leave,
}

impl DeltaCopy<'_> {
    // An explicit stack: an untrusted tree may be thousands of folders deep.
    fn walk(&mut self) -> Result<(), EngineError> {
        let stat = fs::fstat(self.source.current()).map_err(|e| self.failed("access", None, e))?;
        let root = FolderFrame {
            name: CString::default(),
            stat,
            before: Some(index::ROOT),
            seen: Some(index::ROOT),
            opaque: false,
        };
        self.ancestors.push(root);
        let mut steps = vec![WalkStep::Leave];
        self.copy_folder(index::ROOT, &mut steps)?;
        while let Some(step) = steps.pop().filter(|_| !self.over_limit) {
            match step {
                WalkStep::Enter(frame, changed) => {
                    let inode = frame.stat.st_ino;
                    if !self.enter(*frame)? {
                        continue;
                    }
                    steps.push(WalkStep::Leave);
                    if changed {
                        self.create_ancestors()?;
                    }
                    self.copy_folder(inode, &mut steps)?;
                }
                WalkStep::Leave => self.leave()?,
            }
        }
        Ok(())
    }

    /// Returns false when the folder disappeared.
    fn enter(&mut self, frame: FolderFrame) -> Result<bool, EngineError> {
        match self.source.descend(&frame.name) {
            Err(error) if self.is_expected_race(error) => return Ok(false),
            result => result.map_err(|e| self.failed("open the folder", Some(&frame.name), e))?,
        }
        self.at.push(OsStr::from_bytes(frame.name.to_bytes()));
        self.ancestors.push(frame);
        Ok(true)
    }

    // While the sandbox runs, a name may disappear or change its type before it is copied. The
    // second pass handles it.
    fn is_expected_race(&self, error: Errno) -> bool {
        matches!(self.pass, Pass::First)
            && matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV)
    }

    fn copy_folder(&mut self, inode: u64, steps: &mut Vec<WalkStep>) -> Result<(), EngineError> {
        let frame = self.ancestors.last().expect("a folder is entered before it is walked");
        let none = FolderEntries::new();
        let old = frame.before.and_then(|inode| self.previous.folder(inode)).unwrap_or(&none);
        let seen = match self.pass {
            Pass::Second(index) => frame.seen.and_then(|inode| index.folder(inode)),
            _ => None,
        };
        let mut present = FolderEntries::new();
        for name in tree::names(self.source.current()).map_err(|e| self.failed("list", None, e))? {
            if let Some(entry) = self.copy_name(&name, index::find(old, &name), seen, steps)? {
                present.push((name, entry));
            }
            if self.over_limit {
                return Ok(());
            }
            // Also when nothing is copied: reading a million names takes longer than a freeze
            // lasts.
            (self.copier.heartbeat)()?;
        }
        for (name, _) in
            seen.into_iter().flatten().filter(|(name, _)| index::find(&present, name).is_none())
        {
            self.remove_copy(name)?;
        }
        // In a full copy `old` is empty, so there are no whiteouts: there is nothing to hide, and
        // overlayfs lists whiteouts as names in a folder that it does not merge.
        for (name, _) in old.iter().filter(|(name, _)| index::find(&present, name).is_none()) {
            // For a name that the first pass did not see either, that pass has added the whiteout.
            if seen.is_none_or(|seen| index::find(seen, name).is_some()) {
                self.add_whiteout(name)?;
            }
        }
        self.index.insert(inode, present);
        Ok(())
    }

    /// Copies a name if it changed and returns its index entry; `None` when the name disappeared.
    fn copy_name(
        &mut self,
        name: &CStr,
        before: Option<&IndexEntry>,
        seen: Option<&FolderEntries>,
        steps: &mut Vec<WalkStep>,
    ) -> Result<Option<IndexEntry>, EngineError> {
        let stat = match tree::stat(self.source.current(), name) {
            Err(error) if self.is_expected_race(error) => return Ok(None),
            result => result.map_err(|e| self.failed("access", Some(name), e))?,
        };
        let first = seen.and_then(|seen| index::find(seen, name));
        let Some(kind) = self.kind(&stat, name, first.or(before))? else { return Ok(None) };
        let entry = IndexEntry::of(&stat, kind, self.captured_at);
        let reusable = first.filter(|first| self.is_reusable(first, &stat, kind));
        if seen.is_some() && reusable.is_none() && (first.is_some() || before.is_some()) {
            // The first pass left an outdated copy or a whiteout here.
            self.remove_copy(name)?;
        }
        match kind {
            EntryKind::Folder | EntryKind::OpaqueFolder => {
                let frame = folder_frame(name, stat, kind, before, reusable);
                let changed =
                    !reusable.or(before).is_some_and(|known| known.is_unchanged(&stat, kind));
                steps.push(WalkStep::Enter(Box::new(frame), changed));
            }
            _ if reusable.is_some() => {}
            EntryKind::Whiteout
                if before.is_some_and(|before| before.kind == EntryKind::Whiteout) => {}
            EntryKind::Whiteout => self.add_whiteout(name)?,
            EntryKind::Other if before.is_some_and(|before| before.is_unchanged(&stat, kind)) => {}
            EntryKind::Other if !self.copy(name, &stat)? => return Ok(Some(entry.untrusted())),
            EntryKind::Other => {}
        }
        Ok(Some(entry))
    }

    /// Whether the copy that the first pass made of a name is current.
    fn is_reusable(&self, first: &IndexEntry, stat: &Stat, kind: EntryKind) -> bool {
        match self.pass {
            // The content of a folder is compared name by name.
            Pass::Second(seen) if kind.is_folder() => {
                first.kind == kind
                    && first.inode == stat.st_ino
                    && seen.folder(stat.st_ino).is_some()
            }
            _ => first.is_unchanged(stat, kind),
        }
    }

    /// The kind of a name; `None` when the name disappeared.
    fn kind(
        &self,
        stat: &Stat,
        name: &CStr,
        known: Option<&IndexEntry>,
    ) -> Result<Option<EntryKind>, EngineError> {
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            // An attribute cannot change without the ctime, and opening every folder would double
            // the time of a walk.
            if let Some(known) =
                known.filter(|known| known.kind.is_folder() && known.is_unchanged(stat, known.kind))
            {
                return Ok(Some(known.kind));
            }
            let path = Path::new(OsStr::from_bytes(name.to_bytes()));
            let opaque = tree::open_folder(self.source.current(), path)
                .and_then(|folder| tree::is_opaque(folder.as_fd()));
            return match opaque {
                Err(error) if self.is_expected_race(error) => Ok(None),
                Err(error) => Err(self.failed("read the attributes of", Some(name), error)),
                Ok(true) => Ok(Some(EntryKind::OpaqueFolder)),
                Ok(false) => Ok(Some(EntryKind::Folder)),
            };
        }
        let whiteout = tree::is_whiteout(stat);
        Ok(Some(if whiteout { EntryKind::Whiteout } else { EntryKind::Other }))
    }

    /// Returns false when there is no valid copy: the source changed during the copy, or the limit
    /// is reached.
    fn copy(&mut self, name: &CStr, stat: &Stat) -> Result<bool, EngineError> {
        let stored = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if matches!(self.pass, Pass::Only { max_bytes } if self.copier.bytes + stored > max_bytes) {
            self.over_limit = true;
            return Ok(false);
        }
        self.create_ancestors()?;
        self.names += 1;
        self.at.push(OsStr::from_bytes(name.to_bytes()));
        let copied =
            self.copier.copy(self.source.current(), name, stat, self.target.current(), &self.at);
        self.at.pop();
        match copied {
            Err(error) if matches!(self.pass, Pass::First) && !is_disk_full(&error) => {
                self.remove_copy(name)?;
                Ok(false)
            }
            copied => copied.map(|()| true),
        }
    }

    /// Removes what the first pass copied under a name, if anything.
    fn remove_copy(&mut self, name: &CStr) -> Result<(), EngineError> {
        self.create_ancestors()?;
        trash::delete_in(self.target.current(), name)
            .map_err(|e| self.failed("copy", Some(name), e))
    }

    fn add_whiteout(&mut self, name: &CStr) -> Result<(), EngineError> {
        self.create_ancestors()?;
        self.names += 1;
        tree::make_whiteout(self.target.current(), name)
            .map_err(|e| self.failed("record the removal of", Some(name), e))
    }

    /// Creates the copies of the folder being walked and its ancestors where they are missing.
    fn create_ancestors(&mut self) -> Result<(), EngineError> {
        while let Some(frame) = self.ancestors.get(self.target.depth()) {
            match fs::mkdirat(self.target.current(), &frame.name, Mode::RWXU) {
                Ok(()) => self.names += 1,
                Err(Errno::EXIST) if matches!(self.pass, Pass::Second(_)) => {}
                Err(error) => return Err(self.failed("copy", None, error)),
            }
            self.target.descend(&frame.name).map_err(|e| self.failed("copy", None, e))?;
        }
        Ok(())
    }

    // Metadata is copied last, because writing into a folder changes its times.
    fn leave(&mut self) -> Result<(), EngineError> {
        let made = self.target.depth() == self.ancestors.len();
        let frame = self.ancestors.pop().expect("a folder is left after it was entered");
        let mut left = || {
            if made {
                if frame.opaque {
                    tree::make_opaque(self.target.current())?;
                }
                let (from, to) = (self.source.current(), self.target.current());
                tree::copy_file_metadata(from, to, &frame.stat)?;
                self.target.ascend()?;
            }
            self.source.ascend()
        };
        let left = left();
        left.map_err(|e| self.failed("copy", None, e))?;
        self.at.pop();
        Ok(())
    }

    fn failed(&self, doing: &'static str, name: Option<&CStr>, error: Errno) -> EngineError {
        let path = name.map_or_else(|| self.at.clone(), |name| tree::join(&self.at, name));
        EngineError::file(doing, self.root.join(tree::truncate_path(&path)), error)
    }
}

fn folder_frame(
    name: &CStr,
    stat: Stat,
    kind: EntryKind,
    before: Option<&IndexEntry>,
    reusable: Option<&IndexEntry>,
) -> FolderFrame {
    let opaque = kind == EntryKind::OpaqueFolder;
    let merged = before.filter(|before| {
        before.kind.is_folder() && (!opaque || before.kind == EntryKind::OpaqueFolder)
    });
    FolderFrame {
        name: name.to_owned(),
        stat,
        before: merged.map(|before| before.inode),
        seen: reusable.map(|reusable| reusable.inode),
        opaque: opaque && merged.is_none(),
    }
}

// A full disk is never caused by a race with the sandbox, so it is not retried.
pub(crate) fn is_disk_full(error: &EngineError) -> bool {
    let kinds = [std::io::ErrorKind::StorageFull, std::io::ErrorKind::QuotaExceeded];
    matches!(error, EngineError::File { source, .. } if kinds.contains(&source.kind()))
}
