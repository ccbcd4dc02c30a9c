//! Resolves the paths of an archive's entries. Symlinks are followed as in the finished image, with
//! the layers below, so no path leaves the layer: the kernel only ever gets single names below an
//! open folder and never follows a symlink.

use std::{
    collections::VecDeque,
    ffi::{CStr, CString, OsStr},
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
    /// A folder, or nothing. `fd`: the folder in this layer, if it has one. `whiteout`: this layer
    /// hides what the layers below have.
    Folder {
        fd: Option<OwnedFd>,
        below: Vec<OwnedFd>,
        whiteout: bool,
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
        let whiteout = match tree::stat(self.fd(), name) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                return open_folder(self.fd(), name);
            }
            Ok(stat) => {
                remove()?;
                tree::is_whiteout(&stat)
            }
            Err(Errno::NOENT) => false,
            Err(error) => return Err(error),
        };
        fs::mkdirat(self.fd(), name, Mode::RWXU)?;
        let folder = open_folder(self.fd(), name)?;
        if whiteout {
            // The removed whiteout hid the layers below; the folder must keep hiding them.
            tree::make_opaque(folder.as_fd())?;
        }
        Ok(folder)
    }

    fn lookup(&self, name: &CString) -> Result<Lookup, Errno> {
        let read = |folder: BorrowedFd<'_>| {
            fs::readlinkat(folder, name, Vec::new()).map(CString::into_bytes)
        };
        let folder = |fd, below| Lookup::Folder { fd, below, whiteout: false };
        let mut found: Option<OwnedFd> = None;
        match tree::stat(self.fd(), name) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    let fd = open_folder(self.fd(), name)?;
                    if tree::is_opaque(fd.as_fd())? {
                        return Ok(folder(Some(fd), Vec::new()));
                    }
                    found = Some(fd);
                }
                FileType::Symlink => return Ok(Lookup::Symlink(read(self.fd())?)),
                _ if tree::is_whiteout(&stat) => {
                    return Ok(Lookup::Folder { fd: None, below: Vec::new(), whiteout: true });
                }
                _ => return Ok(Lookup::Other),
            },
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        Ok(match (found, lookup_folders(&self.below, name)?) {
            (None, None) => match self.below(name) {
                Some((folder, stat))
                    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink =>
                {
                    Lookup::Symlink(read(folder)?)
                }
                _ => Lookup::Other,
            },
            // A file below this layer's folder is hidden.
            (fd, below) => folder(fd, below.unwrap_or_default()),
        })
    }
}

/// Opens the folder of this name in a folder. Follows no symlink.
pub(super) fn open_folder(folder: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    tree::open_folder(folder, Path::new(OsStr::from_bytes(name.to_bytes())))
}

/// The folders of the name `name` in the folders `visible` (top first) that overlay merges. Empty
/// when the name does not exist, `None` when it is not a folder.
pub(crate) fn lookup_folders(
    visible: &[OwnedFd],
    name: &CStr,
) -> Result<Option<Vec<OwnedFd>>, Errno> {
    let mut found = Vec::new();
    for folder in visible {
        let stat = match tree::stat(folder.as_fd(), name) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error),
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            // A whiteout, or a file below a folder, ends the merged folder.
            let ends = tree::is_whiteout(&stat) || !found.is_empty();
            return Ok(ends.then_some(found));
        }
        let inner = open_folder(folder.as_fd(), name)?;
        let opaque = tree::is_opaque(inner.as_fd())?;
        found.push(inner);
        if opaque {
            break;
        }
    }
    Ok(Some(found))
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
                    Lookup::Folder { fd, below, whiteout } => {
                        current = descend(current, &name, fd, below, whiteout)?
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
            let made = open_folder(current.fd(), name)?;
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
