//! Where a path leads. The path is a client's and the links on its way belong to whoever works in the sandbox,
//! while pid 1 may go where nobody inside may: so links of the kernel's own, such as `/proc/1/fd/7`, which
//! would lead to what pid 1 holds open, are not followed; and once a folder is found, it is used by its
//! descriptor, so that nobody can put another in its place meanwhile.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat2},
    io::Errno,
};

// openat2 answers EAGAIN when something was renamed on its way; somebody who does nothing else must not keep
// us here.
const TRIES: usize = 64;

/// Opens what a path leads to, through ordinary links only.
pub(super) fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let mut tried = 0;
    loop {
        match openat2(
            CWD,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::NO_MAGICLINKS,
        ) {
            Err(Errno::AGAIN | Errno::INTR) if tried < TRIES => tried += 1,
            opened => return Ok(OwnedFd::into(opened?)),
        }
    }
}

/// A path to what is held open. It means something to this process alone.
pub(super) fn through(open: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()))
}

/// A name in a folder that is held open.
pub(super) struct Place {
    folder: File,
    path: PathBuf,
}

impl Place {
    /// The place of a path whose last part may or may not be there.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let missing = || io::Error::new(io::ErrorKind::InvalidInput, "not the path of a file");
        let (parent, name) =
            (path.parent().ok_or_else(missing)?, path.file_name().ok_or_else(missing)?);
        let folder = open(parent, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let path = through(&folder).join(name);
        Ok(Self { folder, path })
    }

    /// The way there, through the folder that is held.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Another name in the same folder.
    pub(super) fn beside(&self, name: &str) -> PathBuf {
        through(&self.folder).join(name)
    }

    /// Returns when the folder's names are on disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.folder.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn ordinary_links_are_followed_and_those_of_the_kernel_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink("file", at("honest")).unwrap();
        let held = File::open(folder.path()).unwrap();
        symlink(through(&held), at("trap")).unwrap();
        symlink(through(&File::open(at("file")).unwrap()), at("gone")).unwrap();
        assert!(open(&at("honest"), OFlags::RDONLY).is_ok());
        assert!(through(&held).join("file").exists(), "the trap would work");
        for trap in ["trap", "trap/file", "gone"] {
            assert!(open(&at(trap), OFlags::RDONLY).is_err(), "{trap}");
        }
        assert!(Place::of(&at("trap/new")).is_err());
        assert!(Place::of(&at("new")).is_ok() && Place::of(Path::new("/")).is_err());
    }
}
