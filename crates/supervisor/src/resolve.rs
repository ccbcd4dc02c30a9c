//! Resolves untrusted paths. Pid 1 has more access than the processes inside, which control the
//! links on the way. Therefore magic links of the kernel, such as `/proc/1/fd/7`, which would
//! expose what pid 1 holds open, are not followed; and a resolved folder is used by its descriptor,
//! so that it cannot be replaced meanwhile.

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

// openat2 fails with EAGAIN when a component is renamed meanwhile; constant renames must not block.
const MAX_ATTEMPTS: usize = 64;

/// Opens a path, following ordinary links only.
pub(crate) fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let mut attempts = 0;
    let (flags, resolve) = (flags | OFlags::CLOEXEC, ResolveFlags::NO_MAGICLINKS);
    loop {
        match openat2(CWD, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) if attempts < MAX_ATTEMPTS => attempts += 1,
            opened => return Ok(OwnedFd::into(opened?)),
        }
    }
}

/// Opens a regular file for reading. Non-blocking, because opening a FIFO would wait for a writer.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let file = open(path, OFlags::RDONLY | OFlags::NONBLOCK)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// A path to an open file, valid in this process only.
pub(crate) fn fd_path(open: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()))
}

/// A name in an open folder.
pub(crate) struct ResolvedPath {
    folder: File,
    path: PathBuf,
}

impl ResolvedPath {
    /// Resolves the parent of a path; the last component need not exist.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not a file path");
        let (parent, name) =
            (path.parent().ok_or_else(invalid)?, path.file_name().ok_or_else(invalid)?);
        let folder = open(parent, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let path = fd_path(&folder).join(name);
        Ok(Self { folder, path })
    }

    /// The path through the open folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Another name in the same folder.
    pub(crate) fn sibling(&self, name: &str) -> PathBuf {
        fd_path(&self.folder).join(name)
    }

    /// Flushes the folder to disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.folder.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn magic_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink("file", at("honest")).unwrap();
        let open_folder = File::open(folder.path()).unwrap();
        symlink(fd_path(&open_folder), at("trap")).unwrap();
        symlink(fd_path(&File::open(at("file")).unwrap()), at("gone")).unwrap();
        assert!(open(&at("honest"), OFlags::RDONLY).is_ok());
        assert!(fd_path(&open_folder).join("file").exists(), "control: the magic link works");
        for trap in ["trap", "trap/file", "gone"] {
            assert!(open(&at(trap), OFlags::RDONLY).is_err(), "{trap}");
        }
        assert!(ResolvedPath::of(&at("trap/new")).is_err());
        assert!(ResolvedPath::of(&at("new")).is_ok() && ResolvedPath::of(Path::new("/")).is_err());
    }
}
