//! Resolves the paths of an archive's entries. Symlinks are followed as in the finished image, with
//! the layers below, so no path leaves the layer: the kernel only ever gets single names below an
//! open folder and never follows a symlink.

use std::{
    collections::VecDeque,
    ffi::{CString, OsStr},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use harvest_engine::tree;
use rustix::{
    fs::{self, FileType, Gid, Mode, Stat, Uid},
    io::Errno,
};

// The kernel's limit of symlinks in one path. `..` counts too, because each restarts at the root.
const MAX_HOPS: usize = 40;

/// A folder of the layer, with the same folder in the layers below.
pub(super) struct LayerFolder {
    fd: OwnedFd,
    /// Top first; empty when this folder hides them.
    below: Vec<OwnedFd>,
    /// The components of the real path, without symlinks.
    path: Vec<Vec<u8>>,
    /// The path that was resolved.
    requested: Vec<u8>,
}

/// What a name in a folder refers to.
enum Lookup {
    /// `whiteout`: this layer hides what the layers below have.
    Missing {
        whiteout: bool,
    },
    /// `fd`: the folder in this layer, if it has one.
    Folder {
        fd: Option<OwnedFd>,
        below: Vec<OwnedFd>,
    },
    Symlink(Vec<u8>),
    Other,
}

impl LayerFolder {
    /// The folder in the layer itself.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The real path of a name in this folder.
    pub(super) fn path(&self, name: &CString) -> PathBuf {
        let parts = self.path.iter().map(Vec::as_slice).chain([name.to_bytes()]);
        parts.map(OsStr::from_bytes).collect()
    }

    /// The topmost entry of this name in the layers below.
    pub(super) fn below(&self, name: &CString) -> Option<(BorrowedFd<'_>, Stat)> {
        let found = self
            .below
            .iter()
            .find_map(|folder| Some((folder.as_fd(), tree::stat(folder.as_fd(), name).ok()?)));
        found.filter(|(_, stat)| !tree::is_whiteout(stat))
    }

    /// Creates a folder or opens the existing one. `remove` deletes anything else of that name.
    pub(super) fn create_folder(
        &self,
        name: &CString,
        remove: &mut dyn FnMut() -> Result<(), Errno>,
    ) -> Result<OwnedFd, Errno> {
        let open = || tree::open_folder(self.fd(), Path::new(OsStr::from_bytes(name.to_bytes())));
        let whiteout = match tree::stat(self.fd(), name) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                return open();
            }
            Ok(stat) => {
                remove()?;
                tree::is_whiteout(&stat)
            }
            Err(Errno::NOENT) => false,
            Err(error) => return Err(error),
        };
        fs::mkdirat(self.fd(), name, Mode::RWXU)?;
        let folder = open()?;
        if whiteout {
            // The removed whiteout hid the layers below; the folder must keep hiding them.
            tree::make_opaque(folder.as_fd())?;
        }
        Ok(folder)
    }

    fn lookup(&self, name: &CString) -> Result<Lookup, Errno> {
        let open = |folder: BorrowedFd<'_>| {
            tree::open_folder(folder, Path::new(OsStr::from_bytes(name.to_bytes())))
        };
        let read = |folder: BorrowedFd<'_>| {
            fs::readlinkat(folder, name, Vec::new()).map(CString::into_bytes)
        };
        let mut found: Option<OwnedFd> = None;
        match tree::stat(self.fd(), name) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    let fd = open(self.fd())?;
                    if tree::is_opaque(fd.as_fd())? {
                        return Ok(Lookup::Folder { fd: Some(fd), below: Vec::new() });
                    }
                    found = Some(fd);
                }
                FileType::Symlink => return Ok(Lookup::Symlink(read(self.fd())?)),
                _ if tree::is_whiteout(&stat) => return Ok(Lookup::Missing { whiteout: true }),
                _ => return Ok(Lookup::Other),
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
                FileType::Symlink if first => return Ok(Lookup::Symlink(read(folder.as_fd())?)),
                _ if tree::is_whiteout(&stat) || !first => break,
                _ => return Ok(Lookup::Other),
            }
        }
        Ok(match (found, below.is_empty()) {
            (None, true) => Lookup::Missing { whiteout: false },
            (fd, _) => Lookup::Folder { fd, below },
        })
    }
}

/// Finds the folders of the layer and creates missing ones.
pub(super) struct PathResolver {
    root: OwnedFd,
    below: Vec<OwnedFd>,
    /// The last folder, kept open because the entries of a folder usually follow each other.
    last: Option<LayerFolder>,
}

impl PathResolver {
    pub(super) fn new(root: OwnedFd, below: Vec<OwnedFd>) -> Self {
        Self { root, below, last: None }
    }

    pub(super) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Keeps a folder open for the next entry.
    pub(super) fn keep_open(&mut self, folder: LayerFolder) {
        self.last = Some(folder);
    }

    /// Closes the kept folder, because a replaced entry may have changed what its path refers to.
    pub(super) fn close_last(&mut self) {
        self.last = None;
    }

    /// The folder at the end of these names. A missing folder is created: with the owner and mode
    /// of the same folder in the layers below, or else as root's.
    pub(super) fn resolve(&mut self, names: &[&[u8]]) -> Result<LayerFolder, Errno> {
        let requested = names.join(&b'/');
        if let Some(last) = self.last.take_if(|last| last.requested == requested) {
            return Ok(last);
        }
        let mut pending: VecDeque<Vec<u8>> = names.iter().map(|name| name.to_vec()).collect();
        let mut current = self.root_folder()?;
        let mut hops = 0;
        while let Some(name) = pending.pop_front() {
            if name == b".." {
                hops += 1;
                current.path.pop();
                let path = std::mem::take(&mut current.path);
                for part in path.into_iter().rev() {
                    pending.push_front(part);
                }
                current = self.root_folder()?;
            } else {
                let name = CString::new(name).map_err(|_| Errno::INVAL)?;
                match current.lookup(&name)? {
                    Lookup::Symlink(target) => {
                        hops += 1;
                        if target.starts_with(b"/") {
                            current = self.root_folder()?;
                        }
                        let parts = target.split(|byte| *byte == b'/');
                        for part in parts.rev().filter(|part| !matches!(*part, b"" | b".")) {
                            pending.push_front(part.to_vec());
                        }
                    }
                    Lookup::Missing { whiteout } => {
                        current = descend(current, &name, None, Vec::new(), whiteout)?;
                    }
                    Lookup::Folder { fd, below } => {
                        current = descend(current, &name, fd, below, false)?
                    }
                    Lookup::Other => return Err(Errno::NOTDIR),
                }
            }
            if hops > MAX_HOPS {
                return Err(Errno::LOOP);
            }
        }
        current.requested = requested;
        Ok(current)
    }

    fn root_folder(&self) -> Result<LayerFolder, Errno> {
        let open = |folder: &OwnedFd| tree::open_folder(folder.as_fd(), Path::new(""));
        let below = self.below.iter().map(open).collect::<Result<_, _>>()?;
        Ok(LayerFolder { fd: open(&self.root)?, below, path: Vec::new(), requested: Vec::new() })
    }
}

// Opens a folder of this layer, or creates it.
fn descend(
    mut current: LayerFolder,
    name: &CString,
    fd: Option<OwnedFd>,
    below: Vec<OwnedFd>,
    whiteout: bool,
) -> Result<LayerFolder, Errno> {
    let fd = match fd {
        Some(fd) => fd,
        None => {
            if whiteout {
                fs::unlinkat(current.fd(), name, fs::AtFlags::empty())?;
            }
            fs::mkdirat(current.fd(), name, Mode::RWXU)?;
            let made =
                tree::open_folder(current.fd(), Path::new(OsStr::from_bytes(name.to_bytes())))?;
            match below.first() {
                Some(like) => {
                    tree::copy_file_metadata(like.as_fd(), made.as_fd(), &fs::fstat(like)?)?
                }
                None => {
                    fs::fchown(&made, Some(Uid::ROOT), Some(Gid::ROOT))?;
                    fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
                }
            }
            if whiteout {
                tree::make_opaque(made.as_fd())?;
            }
            made
        }
    };
    current.path.push(name.to_bytes().to_vec());
    Ok(LayerFolder { fd, below, path: current.path, requested: Vec::new() })
}
