//! Copies what has changed in a writable layer since its last capture into a new layer, such that
//! the layers below, the earlier copies and this one show together what the original shows.
//!
//! The rules, for a name in a folder that the last capture saw too:
//! - changed (another inode, another ctime, another kind): copied; a copy hides everything below;
//! - gone: a whiteout, or the earlier copy would show;
//! - a folder that has become opaque: copied whole and opaque. One that was opaque already is *not*
//!   marked again, because that would hide the earlier copies it relies on; the first of them is
//!   opaque and shuts out what lies below.
//!
//! A sandbox with much to copy is copied in two passes: the first while it runs ([`copy_running`]), the
//! second while it stands still ([`bring_up_to_date`]), which does again what has changed meanwhile.
//! What the first pass put into the copy of a folder is what its index has for that folder's inode, and
//! a name is left as it is only if inode and ctime are those the first pass saw *before* it copied: so
//! nothing that happens during the first pass can make the second leave something wrong.

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
    trash,
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
    let (index, copied) =
        copy(source, target, previous, Pass::Only { most_bytes: u64::MAX }, taken, pulse)?;
    Ok((index.unwrap_or_default(), copied))
}

/// The same if it comes to no more than `most_bytes`; `None` when it does, with half a copy made.
pub(crate) fn copy_small_delta(
    source: &Path,
    target: &Path,
    previous: &Index,
    most_bytes: u64,
    taken: i64,
    pulse: &mut dyn FnMut() -> Result<(), EngineError>,
) -> Result<Option<(Index, Copied)>, EngineError> {
    let (index, copied) = copy(source, target, previous, Pass::Only { most_bytes }, taken, pulse)?;
    Ok(index.map(|index| (index, copied)))
}

/// The first pass: the same while the source changes, so that what it answers is a guess.
pub(crate) fn copy_running(
    source: &Path,
    target: &Path,
    previous: &Index,
    began: i64,
) -> Result<(Index, Copied), EngineError> {
    let (index, copied) = copy(source, target, previous, Pass::First, began, &mut || Ok(()))?;
    let mut index = index.unwrap_or_default();
    index.forget_doubtful();
    Ok((index, copied))
}

/// The second pass: makes of the copy a first pass left, which saw `seen`, what the source is now.
pub(crate) fn bring_up_to_date(
    source: &Path,
    target: &Path,
    previous: &Index,
    seen: &Index,
    taken: i64,
    pulse: &mut dyn FnMut() -> Result<(), EngineError>,
) -> Result<(Index, Copied), EngineError> {
    let (index, copied) = copy(source, target, previous, Pass::Second(seen), taken, pulse)?;
    Ok((index.unwrap_or_default(), copied))
}

#[derive(Clone, Copy)]
enum Pass<'a> {
    /// Given up when it comes to more than this.
    Only {
        most_bytes: u64,
    },
    First,
    Second(&'a Index),
}

fn copy(
    source: &Path,
    target: &Path,
    previous: &Index,
    pass: Pass<'_>,
    taken: i64,
    pulse: &mut dyn FnMut() -> Result<(), EngineError>,
) -> Result<(Option<Index>, Copied), EngineError> {
    let (from, to) = (tree::open_root(source)?, tree::open_root(target)?);
    let open = |path: &Path, e| disk_error("open the folder", path, e);
    let mut delta = Delta {
        root: source,
        at: PathBuf::new(),
        previous,
        pass,
        taken,
        source: Trail::new(from.as_fd()).map_err(|e| open(source, e))?,
        target: Trail::new(to.as_fd()).map_err(|e| open(target, e))?,
        copier: Copier::new(to.as_fd(), pulse),
        above: Vec::new(),
        index: Index::default(),
        names: 0,
        given_up: false,
    };
    delta.walk()?;
    let copied = Copied { names: delta.names, bytes: delta.copier.bytes };
    Ok(((!delta.given_up).then_some(delta.index), copied))
}

struct Delta<'a> {
    root: &'a Path,
    /// The folder being walked, below `root`.
    at: PathBuf,
    previous: &'a Index,
    pass: Pass<'a>,
    taken: i64,
    source: Trail,
    /// As far down as there are copies.
    target: Trail,
    copier: Copier<'a>,
    /// The folders from the root to the one being walked.
    above: Vec<Level>,
    index: Index,
    names: u64,
    given_up: bool,
}

/// A folder on the way down.
struct Level {
    name: CString,
    stat: Stat,
    /// The inode the last capture saw here. `None` where everything below is copied, since no earlier
    /// copy shows through.
    before: Option<u64>,
    /// The inode the first pass saw here. `None` where its copy has nothing here.
    seen: Option<u64>,
    /// Its copy hides everything below.
    opaque: bool,
}

enum Step {
    Enter(Box<Level>, /* the folder itself has changed */ bool),
    Leave,
}

impl Delta<'_> {
    // An explicit stack: a hostile tree may be thousands of folders deep.
    fn walk(&mut self) -> Result<(), EngineError> {
        let stat = fs::fstat(self.source.here()).map_err(|e| self.failed("look at", None, e))?;
        let root = Level {
            name: CString::default(),
            stat,
            before: Some(index::ROOT),
            seen: Some(index::ROOT),
            opaque: false,
        };
        self.above.push(root);
        let mut steps = vec![Step::Leave];
        self.folder(index::ROOT, &mut steps)?;
        while let Some(step) = steps.pop().filter(|_| !self.given_up) {
            match step {
                Step::Enter(level, changed) => {
                    let inode = level.stat.st_ino;
                    if !self.enter(*level)? {
                        continue;
                    }
                    steps.push(Step::Leave);
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

    /// False when it is gone by now.
    fn enter(&mut self, level: Level) -> Result<bool, EngineError> {
        match self.source.down(&level.name) {
            Err(error) if self.passes(error) => return Ok(false),
            result => result.map_err(|e| self.failed("open the folder", Some(&level.name), e))?,
        }
        self.at.push(OsStr::from_bytes(level.name.to_bytes()));
        self.above.push(level);
        Ok(true)
    }

    // While the source runs, a name may be gone, or be something else, before we get to it. The second
    // pass sees what it has become.
    fn passes(&self, error: Errno) -> bool {
        matches!(self.pass, Pass::First)
            && matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV)
    }

    fn folder(&mut self, inode: u64, steps: &mut Vec<Step>) -> Result<(), EngineError> {
        let level = self.above.last().expect("a folder is entered before it is walked");
        let none = Names::new();
        let old = level.before.and_then(|inode| self.previous.folder(inode)).unwrap_or(&none);
        let seen = match self.pass {
            Pass::Second(index) => level.seen.and_then(|inode| index.folder(inode)),
            _ => None,
        };
        let mut present = Names::new();
        for name in tree::names(self.source.here()).map_err(|e| self.failed("list", None, e))? {
            if let Some(entry) = self.name(&name, index::find(old, &name), seen, steps)? {
                present.push((name, entry));
            }
            if self.given_up {
                return Ok(());
            }
            // Also where nothing is copied: to look at a million names takes longer than a freeze lasts.
            (self.copier.pulse)()?;
        }
        for (name, _) in
            seen.into_iter().flatten().filter(|(name, _)| index::find(&present, name).is_none())
        {
            self.unmake(name)?;
        }
        // In a whole copy `old` is empty: there is nothing to hide, and overlay lists whiteouts as names
        // in a folder it does not merge.
        for (name, _) in old.iter().filter(|(name, _)| index::find(&present, name).is_none()) {
            // Of what the first pass did not find either, it has noted the removal.
            if seen.is_none_or(|seen| index::find(seen, name).is_some()) {
                self.whiteout(name)?;
            }
        }
        self.index.insert(inode, present);
        Ok(())
    }

    /// How a name stands; `None` when it is gone by now.
    fn name(
        &mut self,
        name: &CStr,
        before: Option<&Entry>,
        seen: Option<&Names>,
        steps: &mut Vec<Step>,
    ) -> Result<Option<Entry>, EngineError> {
        let stat = match tree::stat(self.source.here(), name) {
            Err(error) if self.passes(error) => return Ok(None),
            result => result.map_err(|e| self.failed("look at", Some(name), e))?,
        };
        let first = seen.and_then(|seen| index::find(seen, name));
        let Some(kind) = self.kind(&stat, name, first.or(before))? else { return Ok(None) };
        let entry = Entry::of(&stat, kind, self.taken);
        let kept = first.filter(|first| self.is_kept(first, &stat, kind));
        if seen.is_some() && kept.is_none() && (first.is_some() || before.is_some()) {
            // A copy of something else, or the note that nothing is here.
            self.unmake(name)?;
        }
        match kind {
            Kind::Folder | Kind::OpaqueFolder => {
                let level = level(name, stat, kind, before, kept);
                let changed = !kept.or(before).is_some_and(|known| known.still(&stat, kind));
                steps.push(Step::Enter(Box::new(level), changed));
            }
            _ if kept.is_some() => {}
            Kind::Whiteout if before.is_some_and(|before| before.kind == Kind::Whiteout) => {}
            Kind::Whiteout => self.whiteout(name)?,
            Kind::Other if before.is_some_and(|before| before.still(&stat, kind)) => {}
            Kind::Other if !self.copy(name, &stat)? => return Ok(Some(entry.doubted())),
            Kind::Other => {}
        }
        Ok(Some(entry))
    }

    /// Whether what the first pass made of a name can stay.
    fn is_kept(&self, first: &Entry, stat: &Stat, kind: Kind) -> bool {
        match self.pass {
            // What is in the folder is looked at name by name.
            Pass::Second(seen) if kind.is_folder() => {
                first.kind == kind
                    && first.inode == stat.st_ino
                    && seen.folder(stat.st_ino).is_some()
            }
            _ => first.still(stat, kind),
        }
    }

    /// What a name is; `None` when it is gone by now.
    fn kind(
        &self,
        stat: &Stat,
        name: &CStr,
        known: Option<&Entry>,
    ) -> Result<Option<Kind>, EngineError> {
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            // An attribute cannot change without the ctime, and to open every folder takes as long as
            // all the rest of a walk.
            if let Some(known) =
                known.filter(|known| known.kind.is_folder() && known.still(stat, known.kind))
            {
                return Ok(Some(known.kind));
            }
            let path = Path::new(OsStr::from_bytes(name.to_bytes()));
            let opaque = tree::open_folder(self.source.here(), path)
                .and_then(|folder| tree::is_opaque(folder.as_fd()));
            match opaque {
                Err(error) if self.passes(error) => Ok(None),
                Err(error) => Err(self.failed("read the attributes of", Some(name), error)),
                Ok(true) => Ok(Some(Kind::OpaqueFolder)),
                Ok(false) => Ok(Some(Kind::Folder)),
            }
        } else if tree::is_whiteout(stat) {
            Ok(Some(Kind::Whiteout))
        } else {
            Ok(Some(Kind::Other))
        }
    }

    /// False when the source changed under us and there is no copy to rely on.
    fn copy(&mut self, name: &CStr, stat: &Stat) -> Result<bool, EngineError> {
        let stored = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if matches!(self.pass, Pass::Only { most_bytes } if self.copier.bytes + stored > most_bytes)
        {
            self.given_up = true;
            return Ok(false);
        }
        self.make_above()?;
        self.names += 1;
        self.at.push(OsStr::from_bytes(name.to_bytes()));
        let copied = self.copier.copy(self.source.here(), name, stat, self.target.here(), &self.at);
        self.at.pop();
        match copied {
            Err(error) if matches!(self.pass, Pass::First) && !is_full(&error) => {
                self.unmake(name)?;
                Ok(false)
            }
            copied => copied.map(|()| true),
        }
    }

    /// Takes away what the first pass made of a name, if anything.
    fn unmake(&mut self, name: &CStr) -> Result<(), EngineError> {
        self.make_above()?;
        trash::delete_in(self.target.here(), name).map_err(|e| self.failed("copy", Some(name), e))
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
            match fs::mkdirat(self.target.here(), &level.name, Mode::RWXU) {
                Ok(()) => self.names += 1,
                Err(Errno::EXIST) if matches!(self.pass, Pass::Second(_)) => {}
                Err(error) => return Err(self.failed("copy", None, error)),
            }
            self.target.down(&level.name).map_err(|e| self.failed("copy", None, e))?;
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

fn level(
    name: &CStr,
    stat: Stat,
    kind: Kind,
    before: Option<&Entry>,
    kept: Option<&Entry>,
) -> Level {
    let opaque = kind == Kind::OpaqueFolder;
    let merged = before
        .filter(|before| before.kind.is_folder() && (!opaque || before.kind == Kind::OpaqueFolder));
    Level {
        name: name.to_owned(),
        stat,
        before: merged.map(|before| before.inode),
        seen: kept.map(|kept| kept.inode),
        opaque: opaque && merged.is_none(),
    }
}

// Whatever else may be wrong with a file that changes, a full disk is not its doing.
pub(crate) fn is_full(error: &EngineError) -> bool {
    let kinds = [std::io::ErrorKind::StorageFull, std::io::ErrorKind::QuotaExceeded];
    matches!(error, EngineError::File { source, .. } if kinds.contains(&source.kind()))
}
