//! Where an entry of an archive belongs. Links on the way are followed as a sandbox would follow them
//! in the finished image, the layers below included, so no way leads out: the kernel is only ever given
//! single names below an open folder, and told to follow nothing.

use std::{
    collections::VecDeque,
    ffi::{CString, OsStr},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, FileType, Gid, Mode, Stat, Uid},
    io::Errno,
};

use crate::tree;

// The kernel's own limit of links on one way; ways back up count too, each costs a walk.
const MAX_HOPS: usize = 40;

/// A folder of the layer, and those it lies on.
pub(super) struct Here {
    own: OwnedFd,
    /// Top first; none where this folder hides them.
    below: Vec<OwnedFd>,
    /// Its real path, without links.
    way: Vec<Vec<u8>>,
    /// The path by which it was asked for.
    asked: Vec<u8>,
}

/// What a name stands for.
enum Seen {
    Nothing { hidden: bool },
    Folder { own: Option<OwnedFd>, below: Vec<OwnedFd> },
    Link(Vec<u8>),
    Other,
}

impl Here {
    /// The folder in the layer itself.
    pub(super) fn own(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }

    /// The real path of a name in here.
    pub(super) fn path(&self, name: &CString) -> PathBuf {
        let parts = self.way.iter().map(Vec::as_slice).chain([name.to_bytes()]);
        parts.map(OsStr::from_bytes).collect()
    }

    /// The topmost thing of this name in the layers below.
    pub(super) fn below(&self, name: &CString) -> Option<(BorrowedFd<'_>, Stat)> {
        let found = self
            .below
            .iter()
            .find_map(|folder| Some((folder.as_fd(), tree::stat(folder.as_fd(), name).ok()?)));
        found.filter(|(_, stat)| !tree::is_whiteout(stat))
    }

    /// Makes a folder, or opens the one there is. Anything else there goes by `clear`.
    pub(super) fn make_folder(
        &self,
        name: &CString,
        clear: &mut dyn FnMut() -> Result<(), Errno>,
    ) -> Result<OwnedFd, Errno> {
        let open = || tree::open_folder(self.own(), Path::new(OsStr::from_bytes(name.to_bytes())));
        let hidden = match tree::stat(self.own(), name) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                return open();
            }
            Ok(stat) => {
                clear()?;
                tree::is_whiteout(&stat)
            }
            Err(Errno::NOENT) => false,
            Err(error) => return Err(error),
        };
        fs::mkdirat(self.own(), name, Mode::RWXU)?;
        let folder = open()?;
        if hidden {
            // The mark that is gone now hid what lies below; the folder must go on hiding it.
            tree::make_opaque(folder.as_fd())?;
        }
        Ok(folder)
    }

    fn look(&self, name: &CString) -> Result<Seen, Errno> {
        let open = |folder: BorrowedFd<'_>| {
            tree::open_folder(folder, Path::new(OsStr::from_bytes(name.to_bytes())))
        };
        let read = |folder: BorrowedFd<'_>| {
            fs::readlinkat(folder, name, Vec::new()).map(CString::into_bytes)
        };
        let mut found: Option<OwnedFd> = None;
        match tree::stat(self.own(), name) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    let own = open(self.own())?;
                    if tree::is_opaque(own.as_fd())? {
                        return Ok(Seen::Folder { own: Some(own), below: Vec::new() });
                    }
                    found = Some(own);
                }
                FileType::Symlink => return Ok(Seen::Link(read(self.own())?)),
                _ if tree::is_whiteout(&stat) => return Ok(Seen::Nothing { hidden: true }),
                _ => return Ok(Seen::Other),
            },
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        let mut below = Vec::new();
        for folder in &self.below {
            let stat = match tree::stat(folder.as_fd(), name) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error),
            };
            let first = found.is_none() && below.is_empty();
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    let inner = open(folder.as_fd())?;
                    let opaque = tree::is_opaque(inner.as_fd())?;
                    below.push(inner);
                    if opaque {
                        break;
                    }
                }
                FileType::Symlink if first => return Ok(Seen::Link(read(folder.as_fd())?)),
                _ if tree::is_whiteout(&stat) || !first => break,
                _ => return Ok(Seen::Other),
            }
        }
        Ok(match (found, below.is_empty()) {
            (None, true) => Seen::Nothing { hidden: false },
            (own, _) => Seen::Folder { own, below },
        })
    }
}

/// Finds and makes folders of the layer.
pub(super) struct Places {
    root: OwnedFd,
    below: Vec<OwnedFd>,
    /// Entries of one folder come together: the last folder is kept open.
    last: Option<Here>,
}

impl Places {
    pub(super) fn new(root: OwnedFd, below: Vec<OwnedFd>) -> Self {
        Self { root, below, last: None }
    }

    pub(super) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Keeps a folder at hand.
    pub(super) fn leave(&mut self, here: Here) {
        self.last = Some(here);
    }

    /// Something was replaced: what is at hand may not be where it was.
    pub(super) fn forget(&mut self) {
        self.last = None;
    }

    /// The folder at the end of these names. What is missing is made: like those below it, if there are
    /// any, and otherwise as root's.
    pub(super) fn enter(&mut self, names: &[&[u8]]) -> Result<Here, Errno> {
        let asked = names.join(&b'/');
        if let Some(last) = self.last.take_if(|last| last.asked == asked) {
            return Ok(last);
        }
        let mut ahead: VecDeque<Vec<u8>> = names.iter().map(|name| name.to_vec()).collect();
        let mut here = self.start()?;
        let mut hops = 0;
        while let Some(name) = ahead.pop_front() {
            if name == b".." {
                hops += 1;
                here.way.pop();
                let again = std::mem::take(&mut here.way);
                for part in again.into_iter().rev() {
                    ahead.push_front(part);
                }
                here = self.start()?;
            } else {
                let name = CString::new(name).map_err(|_| Errno::INVAL)?;
                match here.look(&name)? {
                    Seen::Link(target) => {
                        hops += 1;
                        if target.starts_with(b"/") {
                            here = self.start()?;
                        }
                        let parts = target.split(|byte| *byte == b'/');
                        for part in parts.rev().filter(|part| !matches!(*part, b"" | b".")) {
                            ahead.push_front(part.to_vec());
                        }
                    }
                    Seen::Nothing { hidden } => here = down(here, &name, None, Vec::new(), hidden)?,
                    Seen::Folder { own, below } => here = down(here, &name, own, below, false)?,
                    Seen::Other => return Err(Errno::NOTDIR),
                }
            }
            if hops > MAX_HOPS {
                return Err(Errno::LOOP);
            }
        }
        here.asked = asked;
        Ok(here)
    }

    fn start(&self) -> Result<Here, Errno> {
        let open = |folder: &OwnedFd| tree::open_folder(folder.as_fd(), Path::new(""));
        let below = self.below.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Here { own: open(&self.root)?, below, way: Vec::new(), asked: Vec::new() })
    }
}

fn down(
    mut here: Here,
    name: &CString,
    own: Option<OwnedFd>,
    below: Vec<OwnedFd>,
    hidden: bool,
) -> Result<Here, Errno> {
    let own = match own {
        Some(own) => own,
        None => {
            if hidden {
                fs::unlinkat(here.own(), name, fs::AtFlags::empty())?;
            }
            fs::mkdirat(here.own(), name, Mode::RWXU)?;
            let made =
                tree::open_folder(here.own(), Path::new(OsStr::from_bytes(name.to_bytes())))?;
            match below.first() {
                Some(like) => {
                    tree::copy_file_metadata(like.as_fd(), made.as_fd(), &fs::fstat(like)?)?
                }
                None => {
                    fs::fchown(&made, Some(Uid::ROOT), Some(Gid::ROOT))?;
                    fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
                }
            }
            if hidden {
                tree::make_opaque(made.as_fd())?;
            }
            made
        }
    };
    here.way.push(name.to_bytes().to_vec());
    Ok(Here { own, below, way: here.way, asked: Vec::new() })
}
