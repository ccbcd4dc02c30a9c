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
    ffi::{CStr, CString, OsStr},
    os::{fd::AsFd, unix::ffi::OsStrExt},
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
    tree::{self, Copier, Trail},
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
    let open = |path: &Path, e| disk_error("open the folder", path, e);
    let mut delta = Delta {
        root: source,
        at: PathBuf::new(),
        previous,
        taken,
        source: Trail::new(from.as_fd()).map_err(|e| open(source, e))?,
        target: Trail::new(to.as_fd()).map_err(|e| open(target, e))?,
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
    root: &'a Path,
    /// The folder being walked, below `root`.
    at: PathBuf,
    previous: &'a Index,
    taken: i64,
    source: Trail,
    /// As far down as there are copies.
    target: Trail,
    copier: Copier<'a>,
    /// The folders from the root to the one being walked.
    above: Vec<Level>,
    index: Index,
    names: u64,
}

/// A folder on the way down.
struct Level {
    name: CString,
    stat: Stat,
    /// The inode the last capture saw here. `None` where everything below is copied, since no earlier
    /// copy shows through.
    before: Option<u64>,
    /// Its copy hides everything below.
    opaque: bool,
}

enum Step {
    Enter(Level, /* the folder itself has changed */ bool),
    Leave,
}

impl Delta<'_> {
    // An explicit stack: a hostile tree may be thousands of folders deep.
    fn walk(&mut self) -> Result<(), EngineError> {
        let stat = fs::fstat(self.source.here()).map_err(|e| self.failed("look at", None, e))?;
        let root = Level { name: CString::default(), stat, before: Some(index::ROOT), opaque: false };
        self.above.push(root);
        let mut steps = vec![Step::Leave];
        self.folder(index::ROOT, &mut steps)?;
        while let Some(step) = steps.pop() {
            match step {
                Step::Enter(level, changed) => {
                    steps.push(Step::Leave);
                    let inode = level.stat.st_ino;
                    self.enter(level)?;
                    if changed {
                        self.make_above()?;
                    }
                    self.folder(inode, &mut steps)?;
                }
                Step::Leave => self.leave()?,
            }
        }
        Ok(())
    }

    fn enter(&mut self, level: Level) -> Result<(), EngineError> {
        self.source.down(&level.name).map_err(|e| self.failed("open the folder", Some(&level.name), e))?;
        self.at.push(OsStr::from_bytes(level.name.to_bytes()));
        self.above.push(level);
        Ok(())
    }

    fn folder(&mut self, inode: u64, steps: &mut Vec<Step>) -> Result<(), EngineError> {
        let before = self.above.last().expect("a folder is entered before it is walked").before;
        let none = Names::new();
        let old = before.and_then(|inode| self.previous.folder(inode)).unwrap_or(&none);
        let mut present = Names::new();
        for name in tree::names(self.source.here()).map_err(|e| self.failed("list", None, e))? {
            let entry = self.name(&name, index::find(old, &name), steps)?;
            present.push((name, entry));
            // Also where nothing is copied: to look at a million names takes longer than a freeze lasts.
            (self.copier.pulse)()?;
        }
        // In a whole copy `old` is empty: there is nothing to hide, and overlay lists whiteouts as names
        // in a folder it does not merge.
        for (name, _) in old.iter().filter(|(name, _)| index::find(&present, name).is_none()) {
            self.whiteout(name)?;
        }
        self.index.insert(inode, present);
        Ok(())
    }

    fn name(
        &mut self,
        name: &CStr,
        before: Option<&Entry>,
        steps: &mut Vec<Step>,
    ) -> Result<Entry, EngineError> {
        let stat = tree::stat(self.source.here(), name).map_err(|e| self.failed("look at", Some(name), e))?;
        let kind = self.kind(&stat, name)?;
        let entry = Entry::of(&stat, kind, self.taken);
        match kind {
            Kind::Folder | Kind::OpaqueFolder => {
                let opaque = kind == Kind::OpaqueFolder;
                let merged = before.filter(|before| {
                    before.kind.is_folder() && (!opaque || before.kind == Kind::OpaqueFolder)
                });
                let changed = !before.is_some_and(|before| before.still(&stat, kind));
                let level = Level {
                    name: name.to_owned(),
                    stat,
                    before: merged.map(|before| before.inode),
                    opaque: opaque && merged.is_none(),
                };
                steps.push(Step::Enter(level, changed));
            }
            Kind::Whiteout if before.is_some_and(|before| before.kind == Kind::Whiteout) => {}
            Kind::Whiteout => self.whiteout(name)?,
            Kind::Other if before.is_some_and(|before| before.still(&stat, kind)) => {}
            Kind::Other => self.copy(name, &stat)?,
        }
        Ok(entry)
    }

    fn kind(&self, stat: &Stat, name: &CStr) -> Result<Kind, EngineError> {
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let path = Path::new(OsStr::from_bytes(name.to_bytes()));
            let opaque = tree::open_folder(self.source.here(), path)
                .and_then(|folder| tree::is_opaque(folder.as_fd()));
            let opaque = opaque.map_err(|e| self.failed("read the attributes of", Some(name), e))?;
            Ok(if opaque { Kind::OpaqueFolder } else { Kind::Folder })
        } else if tree::is_whiteout(stat) {
            Ok(Kind::Whiteout)
        } else {
            Ok(Kind::Other)
        }
    }

    fn copy(&mut self, name: &CStr, stat: &Stat) -> Result<(), EngineError> {
        self.make_above()?;
        self.names += 1;
        self.at.push(OsStr::from_bytes(name.to_bytes()));
        let copied = self.copier.copy(self.source.here(), name, stat, self.target.here(), &self.at);
        self.at.pop();
        copied
    }

    fn whiteout(&mut self, name: &CStr) -> Result<(), EngineError> {
        self.make_above()?;
        self.names += 1;
        tree::make_whiteout(self.target.here(), name)
            .map_err(|e| self.failed("note the removal of", Some(name), e))
    }

    /// Makes the copy of the folder being walked, and of those above it, where they are missing.
    fn make_above(&mut self) -> Result<(), EngineError> {
        while let Some(level) = self.above.get(self.target.depth()) {
            let made = fs::mkdirat(self.target.here(), &level.name, Mode::RWXU)
                .and_then(|()| self.target.down(&level.name));
            made.map_err(|e| self.failed("copy", None, e))?;
            self.names += 1;
        }
        Ok(())
    }

    // Last, because writing into a folder moves its times.
    fn leave(&mut self) -> Result<(), EngineError> {
        let made = self.target.depth() == self.above.len();
        let level = self.above.pop().expect("a folder is left after it was entered");
        let mut left = || {
            if made {
                if level.opaque {
                    tree::make_opaque(self.target.here())?;
                }
                tree::copy_file_metadata(self.source.here(), self.target.here(), &level.stat)?;
                self.target.up()?;
            }
            self.source.up()
        };
        let left = left();
        left.map_err(|e| self.failed("copy", None, e))?;
        self.at.pop();
        Ok(())
    }

    fn failed(&self, doing: &'static str, name: Option<&CStr>, error: Errno) -> EngineError {
        let path = name.map_or_else(|| self.at.clone(), |name| tree::join(&self.at, name));
        disk_error(doing, self.root.join(tree::shown(&path)), error)
    }
}
