//! Copies trees between the host and a sandbox, without a shell inside. What comes out of a sandbox is
//! a stranger's: every name is checked, every folder on the host is opened by descriptor and no link on
//! the way is followed, so nothing is written outside the target; set-id bits stay inside.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

use harvest_proto::bridge::{FaultCode, FileKind, FileRequest, FileStat, Reply};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fchmod, mkdirat, openat, renameat, symlinkat, unlinkat},
    io::Errno,
};

use super::{Guest, GuestError, misunderstood};
use crate::disk::random_name;

/// Deeper than any tree people make, shallower than what the stack holds.
const MAX_DEPTH: usize = 256;

/// What a copy came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopiedTree {
    /// Files.
    pub files: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Sockets, pipes and devices, which are not copied.
    pub skipped: u64,
}

impl Guest {
    /// Copies a file, link or folder of the host to `to`, which names the copy itself. Existing folders
    /// are filled; files are replaced. Everything belongs to `user`, the image's when absent.
    ///
    /// # Errors
    /// When something cannot be read here or written there.
    pub fn copy_in(&mut self, from: &Path, to: &str, user: Option<&str>) -> Result<CopiedTree, GuestError> {
        let mut copied = CopiedTree::default();
        self.put(from, to, user, &mut copied, 0)?;
        Ok(copied)
    }

    /// Copies a file, link or folder of the sandbox to `to`, which names the copy itself. Existing
    /// folders are filled; files are replaced.
    ///
    /// # Errors
    /// When something cannot be read there or written here.
    pub fn copy_out(&mut self, from: &str, to: &Path) -> Result<CopiedTree, GuestError> {
        let name = to.file_name().ok_or_else(|| local("the target has no name"))?;
        let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The person named this folder; links on the way to it are theirs.
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = openat(CWD, folder, flags, Mode::empty()).map_err(errno)?;
        let about = self.stat(from)?;
        let mut copied = CopiedTree::default();
        self.get(from, &about, &folder, Path::new(name), &mut copied, 0)?;
        Ok(copied)
    }

    /// Where a symbolic link points.
    ///
    /// # Errors
    /// When it is none.
    pub fn read_link(&mut self, path: &str) -> Result<String, GuestError> {
        match self.ask_file(FileRequest::ReadLink { path: path.to_owned() })? {
            Reply::Link { target } => Ok(target),
            _ => Err(misunderstood()),
        }
    }

    /// Removes a file or a link.
    ///
    /// # Errors
    /// When there is none.
    pub fn remove(&mut self, path: &str) -> Result<(), GuestError> {
        self.ask_file(FileRequest::Remove { path: path.to_owned() }).map(drop)
    }

    /// Everything a folder holds, however much it is.
    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>, GuestError> {
        let mut all: Vec<FileStat> = Vec::new();
        loop {
            let after = Some(all.last().map_or_else(String::new, |last| last.name.clone()));
            match self.ask_file(FileRequest::List { path: path.to_owned(), after })? {
                Reply::List { entries, more } => {
                    let stuck = entries.is_empty();
                    all.extend(entries);
                    if !more || stuck {
                        return Ok(all);
                    }
                }
                _ => return Err(misunderstood()),
            }
        }
    }

    fn put(
        &mut self,
        from: &Path,
        to: &str,
        user: Option<&str>,
        copied: &mut CopiedTree,
        depth: usize,
    ) -> Result<(), GuestError> {
        let about = fs::symlink_metadata(from).map_err(GuestError::Local)?;
        let (path, owner, mode) = (to.to_owned(), user.map(str::to_owned), about.mode() & 0o7777);
        if about.is_symlink() {
            let target = fs::read_link(from).map_err(GuestError::Local)?;
            let target = text(target.as_os_str())?.to_owned();
            self.ask_file(FileRequest::Symlink { path, target, user: owner })?;
        } else if about.is_dir() {
            if depth >= MAX_DEPTH {
                return Err(local("the tree is too deep"));
            }
            self.ask_file(FileRequest::Mkdir { path, mode, user: owner })?;
            for entry in fs::read_dir(from).map_err(GuestError::Local)? {
                let entry = entry.map_err(GuestError::Local)?;
                let inside = join(to, text(&entry.file_name())?);
                self.put(&entry.path(), &inside, user, copied, depth + 1)?;
            }
        } else if about.is_file() {
            // Not waiting: what was a file a moment ago may be a pipe now.
            let open =
                File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(from);
            self.write(to, mode, user, &mut open.map_err(GuestError::Local)?)?;
            copied.files += 1;
            copied.bytes += about.len();
        } else {
            copied.skipped += 1;
        }
        Ok(())
    }

    fn get(
        &mut self,
        from: &str,
        about: &FileStat,
        folder: &OwnedFd,
        name: &Path,
        copied: &mut CopiedTree,
        depth: usize,
    ) -> Result<(), GuestError> {
        match about.kind {
            FileKind::Link => {
                let target = match self.read_link(from) {
                    // Gone, or something else by now: a tree that changes meanwhile is its owner's affair.
                    Err(GuestError::Refused(fault)) if fault.code == FaultCode::NotFound => return Ok(()),
                    other => other?,
                };
                replace(folder, name)?;
                symlinkat(target, folder, name).map_err(errno)
            }
            FileKind::Folder if depth >= MAX_DEPTH => Err(local("the tree is too deep")),
            FileKind::Folder => {
                let inner = enter(folder, name)?;
                for entry in self.list_all(from)? {
                    if !is_plain(&entry.name) {
                        return Err(local("the sandbox gave a name that is none"));
                    }
                    let inside = join(from, &entry.name);
                    self.get(&inside, &entry, &inner, Path::new(&entry.name), copied, depth + 1)?;
                }
                fchmod(&inner, Mode::from_raw_mode(about.mode & 0o777)).map_err(errno)
            }
            FileKind::File => self.get_file(from, about, folder, name, copied),
            FileKind::Other => {
                copied.skipped += 1;
                Ok(())
            }
        }
    }

    fn get_file(
        &mut self,
        from: &str,
        about: &FileStat,
        folder: &OwnedFd,
        name: &Path,
        copied: &mut CopiedTree,
    ) -> Result<(), GuestError> {
        // Beside its place first: what is there stays until all of the copy is.
        let temporary = format!(".harvest-{}", random_name());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(folder, &*temporary, flags, Mode::from_raw_mode(0o600)).map_err(errno)?;
        let mut counted = Counted { file: file.into(), bytes: 0 };
        let whole = self.read(from, &mut counted).and_then(|()| {
            // Without set-id bits: whose it is inside says nothing about whom it would act for here.
            fchmod(counted.file.as_fd(), Mode::from_raw_mode(about.mode & 0o777)).map_err(errno)?;
            renameat(folder, &*temporary, folder, name).map_err(errno)
        });
        if let Err(error) = whole {
            let _ = unlinkat(folder, &*temporary, AtFlags::empty());
            return Err(error);
        }
        copied.files += 1;
        copied.bytes += counted.bytes;
        Ok(())
    }
}

struct Counted {
    file: File,
    bytes: u64,
}

impl io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Makes room for a new link. A folder stays, and the copy fails.
fn replace(folder: &OwnedFd, name: &Path) -> Result<(), GuestError> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(errno(error)),
    }
}

/// Opens a folder, made if it is missing. A link in its place is not followed.
fn enter(folder: &OwnedFd, name: &Path) -> Result<OwnedFd, GuestError> {
    match mkdirat(folder, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(errno(error)),
    }
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name, flags, Mode::empty()).map_err(errno)
}

/// Whether a name is one part of a path and nothing else.
fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

fn join(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

fn text(name: &std::ffi::OsStr) -> Result<&str, GuestError> {
    name.to_str().ok_or_else(|| local("a name is not UTF-8, which the bridge cannot carry"))
}

fn local(words: &'static str) -> GuestError {
    GuestError::Local(io::Error::new(io::ErrorKind::InvalidInput, words))
}

fn errno(error: Errno) -> GuestError {
    GuestError::Local(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_part_is_a_name() {
        for name in ["", ".", "..", "a/b", "/etc", "a\0b", "../x"] {
            assert!(!is_plain(name), "{name:?}");
        }
        assert!(is_plain("...") && is_plain("a b") && is_plain("-rf"));
    }

    #[test]
    fn a_link_in_the_place_of_a_folder_is_not_entered() {
        let host = tempfile::tempdir().unwrap();
        let (target, elsewhere) = (host.path().join("target"), host.path().join("elsewhere"));
        fs::create_dir(&target).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, target.join("trap")).unwrap();
        let folder: OwnedFd = File::open(&target).unwrap().into();
        assert!(enter(&folder, Path::new("trap")).is_err());
        assert!(enter(&folder, Path::new("honest")).is_ok());
    }
}
