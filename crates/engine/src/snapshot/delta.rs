//! Copies what has changed in a writable layer since its last capture into a new layer, such that
//! the layers below, the earlier copies and this one show together what the original shows.
//!
//! The rules, for a name in a folder that the last capture saw too:
//! - changed (another inode, another ctime, another kind): copied; a copy hides everything below;
//! - gone: a whiteout, or the earlier copy would show;
//! - a folder that has become opaque: copied whole and opaque. One that was opaque already is *not*
//!   marked again, because that would hide the earlier copies it relies on; the first of them is
//!   opaque and shuts out what lies below.

use std::{
    ffi::CStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, FileType, Mode, Stat},
    io::Errno,
};

use super::index::{self, Entry, Index, Kind, Names};
use crate::{
    EngineError,
    disk::disk_error,
    tree::{self, Copier},
};

/// What a copy came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Names written, whiteouts included.
    pub(crate) names: u64,
    /// Bytes of content.
    pub(crate) bytes: u64,
}

/// Copies what `previous` does not account for from `source` into the empty folder `target`, and
/// answers what is there now. `taken` is when the source last stood still, in nanoseconds since 1970.
pub(crate) fn copy_delta(
    source: &Path,
    target: &Path,
    previous: &Index,
    taken: i64,
    pulse: &mut dyn FnMut() -> Result<(), EngineError>,
) -> Result<(Index, Copied), EngineError> {
    let (from, to) = (tree::open_root(source)?, tree::open_root(target)?);
    let mut delta = Delta {
        source: from.as_fd(),
        path: source,
        previous,
        taken,
        copier: Copier::new(to.as_fd(), pulse),
        above: Vec::new(),
        index: Index::default(),
        names: 0,
    };
    delta.walk()?;
    let copied = Copied { names: delta.names, bytes: delta.copier.bytes };
    Ok((delta.index, copied))
}

struct Delta<'a> {
    source: BorrowedFd<'a>,
    path: &'a Path,
    previous: &'a Index,
    taken: i64,
    copier: Copier<'a>,
    /// The folders from the root to the one being walked.
    above: Vec<Level>,
    index: Index,
    names: u64,
}

/// A folder on the way down.
struct Level {
    path: PathBuf,
    stat: Stat,
    /// Everything below is copied, since no earlier copy shows through.
    whole: bool,
    /// Its copy hides everything below.
    opaque: bool,
    /// Its copy exists.
    made: bool,
}

enum Step {
    Enter(Level, /* the folder itself has changed */ bool),
    Leave,
}

impl Delta<'_> {
    // An explicit stack: a hostile tree may be thousands of folders deep.
    fn walk(&mut self) -> Result<(), EngineError> {
        let stat = fs::fstat(self.source).map_err(|e| self.failed("look at", Path::new(""), e))?;
        let root = Level { path: PathBuf::new(), stat, whole: false, opaque: false, made: true };
        let mut steps = vec![Step::Enter(root, true)];
        while let Some(step) = steps.pop() {
            match step {
                Step::Enter(level, changed) => {
                    steps.push(Step::Leave);
                    self.above.push(level);
                    if changed {
                        self.make_above()?;
                    }
                    self.folder(&mut steps)?;
                }
                Step::Leave => self.leave()?,
            }
        }
        Ok(())
    }

    fn folder(&mut self, steps: &mut Vec<Step>) -> Result<(), EngineError> {
        let level = self.above.last().expect("a folder is entered before it is walked");
        let (path, whole) = (level.path.clone(), level.whole);
        let folder =
            tree::open_folder(self.source, &path).map_err(|e| self.failed("open the folder", &path, e))?;
        let none = Names::new();
        let old = self.previous.folder(&path).unwrap_or(&none);
        let mut present = Names::new();
        for name in tree::names(folder.as_fd()).map_err(|e| self.failed("list", &path, e))? {
            let before = index::find(old, &name).filter(|_| !whole);
            let entry = self.name(folder.as_fd(), &path, &name, before, steps)?;
            present.push((name, entry));
        }
        // Not in a whole copy: there is nothing to hide, and overlay lists whiteouts as names in a
        // folder it does not merge.
        if !whole {
            for (name, _) in old.iter().filter(|(name, _)| index::find(&present, name).is_none()) {
                self.whiteout(&path, name)?;
            }
        }
        self.index.insert(path, present);
        Ok(())
    }

    fn name(
        &mut self,
        folder: BorrowedFd<'_>,
        path: &Path,
        name: &CStr,
        before: Option<&Entry>,
        steps: &mut Vec<Step>,
    ) -> Result<Entry, EngineError> {
        let here = tree::join(path, name);
        let stat = tree::stat(folder, name).map_err(|e| self.failed("look at", &here, e))?;
        let kind = self.kind(&stat, &here)?;
        let entry = Entry::of(&stat, kind, self.taken);
        match kind {
            Kind::Folder | Kind::OpaqueFolder => {
                let opaque = kind == Kind::OpaqueFolder;
                let merges = before.is_some_and(|before| {
                    before.kind.is_folder() && (!opaque || before.kind == Kind::OpaqueFolder)
                });
                let changed = !before.is_some_and(|before| before.still(&stat, kind));
                let level =
                    Level { path: here, stat, whole: !merges, opaque: opaque && !merges, made: false };
                steps.push(Step::Enter(level, changed));
            }
            Kind::Whiteout if before.is_some_and(|before| before.kind == Kind::Whiteout) => {}
            Kind::Whiteout => self.whiteout(path, name)?,
            Kind::Other if before.is_some_and(|before| before.still(&stat, kind)) => {}
            Kind::Other => {
                let into = self.target_folder()?;
                self.copier.copy(folder, name, &stat, into.as_fd(), &here)?;
                self.names += 1;
            }
        }
        Ok(entry)
    }

    fn kind(&self, stat: &Stat, path: &Path) -> Result<Kind, EngineError> {
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let opaque =
                tree::open_folder(self.source, path).and_then(|folder| tree::is_opaque(folder.as_fd()));
            let opaque = opaque.map_err(|e| self.failed("read the attributes of", path, e))?;
            Ok(if opaque { Kind::OpaqueFolder } else { Kind::Folder })
        } else if tree::is_whiteout(stat) {
            Ok(Kind::Whiteout)
        } else {
            Ok(Kind::Other)
        }
    }

    fn whiteout(&mut self, folder: &Path, name: &CStr) -> Result<(), EngineError> {
        let into = self.target_folder()?;
        self.names += 1;
        tree::make_whiteout(into.as_fd(), name)
            .map_err(|e| self.failed("note the removal of", &tree::join(folder, name), e))
    }

    /// The copy of the folder being walked, made if it is not there yet.
    fn target_folder(&mut self) -> Result<OwnedFd, EngineError> {
        self.make_above()?;
        let path = &self.above.last().expect("names are in folders").path;
        tree::open_folder(self.copier.target, path).map_err(|e| self.failed("copy", path, e))
    }

    fn make_above(&mut self) -> Result<(), EngineError> {
        for at in 0..self.above.len() {
            if !self.above[at].made {
                let path = &self.above[at].path;
                fs::mkdirat(self.copier.target, path, Mode::RWXU)
                    .map_err(|e| self.failed("copy", path, e))?;
                self.above[at].made = true;
                self.names += 1;
            }
        }
        Ok(())
    }

    // Last, because writing into a folder moves its times.
    fn leave(&mut self) -> Result<(), EngineError> {
        let level = self.above.pop().expect("a folder is left after it was entered");
        if !level.made {
            return Ok(());
        }
        let dressed = || {
            let from = tree::open_folder(self.source, &level.path)?;
            let to = tree::open_folder(self.copier.target, &level.path)?;
            if level.opaque {
                tree::make_opaque(to.as_fd())?;
            }
            tree::copy_file_metadata(from.as_fd(), to.as_fd(), &level.stat)
        };
        dressed().map_err(|e| self.failed("copy", &level.path, e))
    }

    fn failed(&self, doing: &'static str, path: &Path, error: Errno) -> EngineError {
        disk_error(doing, self.path.join(path), error)
    }
}
