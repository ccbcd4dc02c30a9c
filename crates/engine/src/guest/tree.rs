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

/// The far side of a copy: files by their paths in a sandbox, whatever way leads there.
pub trait Far {
    /// Why something failed.
    type Error;

    /// Something failed on our own side.
    fn local(error: io::Error) -> Self::Error;

    /// Whether it says that nothing is there.
    fn is_missing(error: &Self::Error) -> bool;

    /// What a path is; a link is a link.
    ///
    /// # Errors
    /// When nothing is there.
    fn stat(&mut self, path: &str) -> Result<FileStat, Self::Error>;

    /// Everything a folder holds, however much it is. A link to a folder is as good as the folder.
    ///
    /// # Errors
    /// When it is none.
    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>, Self::Error>;

    /// Reads a file.
    ///
    /// # Errors
    /// When there is none, or `to` fails.
    fn read(&mut self, path: &str, to: &mut dyn io::Write) -> Result<(), Self::Error>;

    /// Writes a file; it is under its name when this returns.
    ///
    /// # Errors
    /// When it cannot be written, or `from` fails.
    fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn io::Read,
    ) -> Result<(), Self::Error>;

    /// Makes a folder. One that is there already is left as it is.
    ///
    /// # Errors
    /// When it cannot be made.
    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>)
    -> Result<(), Self::Error>;

    /// Makes a symbolic link, in the place of a file or link of that name.
    ///
    /// # Errors
    /// When it cannot be made.
    fn make_link(
        &mut self,
        path: &str,
        target: &str,
        user: Option<&str>,
    ) -> Result<(), Self::Error>;

    /// Where a symbolic link points.
    ///
    /// # Errors
    /// When it is none.
    fn read_link(&mut self, path: &str) -> Result<String, Self::Error>;
}

/// Copies a file, link or folder of the host to `to`, which names the copy itself. Existing folders
/// are filled; files are replaced. Everything belongs to `user`, the far side's default when absent.
///
/// # Errors
/// When something cannot be read here or written there.
pub fn copy_in<F: Far>(
    far: &mut F,
    from: &Path,
    to: &str,
    user: Option<&str>,
) -> Result<CopiedTree, F::Error> {
    let mut copying = Copying::new(far);
    copying.put(from, to, user, 0)?;
    Ok(copying.copied)
}

/// Copies a file, link or folder of the sandbox to `to`, which names the copy itself. Existing
/// folders are filled; files are replaced.
///
/// # Errors
/// When something cannot be read there or written here.
pub fn copy_out<F: Far>(far: &mut F, from: &str, to: &Path) -> Result<CopiedTree, F::Error> {
    let name = to.file_name().ok_or_else(|| local::<F>("the target has no name"))?;
    let folder =
        to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The person named this folder; links on the way to it are theirs.
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = openat(CWD, folder, flags, Mode::empty()).map_err(errno::<F>)?;
    let about = far.stat(from)?;
    let mut copying = Copying::new(far);
    copying.get(from, &about, (&folder, Path::new(name)), 0)?;
    Ok(copying.copied)
}

impl Guest {
    /// [`copy_in`] by this guest.
    ///
    /// # Errors
    /// When something cannot be read here or written there.
    pub fn copy_in(
        &mut self,
        from: &Path,
        to: &str,
        user: Option<&str>,
    ) -> Result<CopiedTree, GuestError> {
        copy_in(self, from, to, user)
    }

    /// [`copy_out`] by this guest.
    ///
    /// # Errors
    /// When something cannot be read there or written here.
    pub fn copy_out(&mut self, from: &str, to: &Path) -> Result<CopiedTree, GuestError> {
        copy_out(self, from, to)
    }

    /// Removes a file or a link.
    ///
    /// # Errors
    /// When there is none.
    pub fn remove(&mut self, path: &str) -> Result<(), GuestError> {
        self.ask_file(FileRequest::Remove { path: path.to_owned(), tree: false }).map(drop)
    }
}

impl Far for Guest {
    type Error = GuestError;

    fn local(error: io::Error) -> GuestError {
        GuestError::Local(error)
    }

    fn is_missing(error: &GuestError) -> bool {
        matches!(error, GuestError::Refused(fault) if fault.code == FaultCode::NotFound)
    }

    fn stat(&mut self, path: &str) -> Result<FileStat, GuestError> {
        Self::stat(self, path)
    }

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

    fn read(&mut self, path: &str, to: &mut dyn io::Write) -> Result<(), GuestError> {
        Self::read(self, path, to)
    }

    fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn io::Read,
    ) -> Result<(), GuestError> {
        Self::write(self, path, mode, user, from)
    }

    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>) -> Result<(), GuestError> {
        let (path, user) = (path.to_owned(), user.map(str::to_owned));
        self.ask_file(FileRequest::Mkdir { path, mode, user }).map(drop)
    }

    fn make_link(
        &mut self,
        path: &str,
        target: &str,
        user: Option<&str>,
    ) -> Result<(), GuestError> {
        let (path, target, user) = (path.to_owned(), target.to_owned(), user.map(str::to_owned));
        self.ask_file(FileRequest::Symlink { path, target, user }).map(drop)
    }

    fn read_link(&mut self, path: &str) -> Result<String, GuestError> {
        match self.ask_file(FileRequest::ReadLink { path: path.to_owned() })? {
            Reply::Link { target } => Ok(target),
            _ => Err(misunderstood()),
        }
    }
}

/// A copy on its way.
struct Copying<'a, F> {
    far: &'a mut F,
    copied: CopiedTree,
}

impl<'a, F: Far> Copying<'a, F> {
    fn new(far: &'a mut F) -> Self {
        Self { far, copied: CopiedTree::default() }
    }

    fn put(
        &mut self,
        from: &Path,
        to: &str,
        user: Option<&str>,
        depth: usize,
    ) -> Result<(), F::Error> {
        let about = fs::symlink_metadata(from).map_err(F::local)?;
        let mode = about.mode() & 0o7777;
        if about.is_symlink() {
            let target = fs::read_link(from).map_err(F::local)?;
            self.far.make_link(to, text::<F>(target.as_os_str())?, user)
        } else if about.is_dir() {
            if depth >= MAX_DEPTH {
                return Err(local::<F>("the tree is too deep"));
            }
            self.far.make_folder(to, mode, user)?;
            for entry in fs::read_dir(from).map_err(F::local)? {
                let entry = entry.map_err(F::local)?;
                let inside = join(to, text::<F>(&entry.file_name())?);
                self.put(&entry.path(), &inside, user, depth + 1)?;
            }
            Ok(())
        } else if about.is_file() {
            // Not waiting: what was a file a moment ago may be a pipe now.
            let open = File::options()
                .read(true)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(from);
            self.far.write(to, mode, user, &mut open.map_err(F::local)?)?;
            self.has_copied(about.len())
        } else {
            self.has_skipped()
        }
    }

    fn get(
        &mut self,
        from: &str,
        about: &FileStat,
        to: Place<'_>,
        depth: usize,
    ) -> Result<(), F::Error> {
        let (folder, name) = to;
        match about.kind {
            FileKind::Link => {
                let target = match about.target.clone().map_or_else(|| self.far.read_link(from), Ok)
                {
                    // Gone, or something else by now: a tree that changes meanwhile is its owner's affair.
                    Err(error) if F::is_missing(&error) => return Ok(()),
                    other => other?,
                };
                replace::<F>(folder, name)?;
                symlinkat(target, folder, name).map_err(errno::<F>)
            }
            FileKind::Folder if depth >= MAX_DEPTH => Err(local::<F>("the tree is too deep")),
            FileKind::Folder => {
                let inner = enter(folder, name).map_err(F::local)?;
                for entry in self.far.list_all(from)? {
                    if !is_plain(&entry.name) {
                        return Err(local::<F>("the sandbox gave a name that is none"));
                    }
                    let inside = join(from, &entry.name);
                    self.get(&inside, &entry, (&inner, Path::new(&entry.name)), depth + 1)?;
                }
                fchmod(&inner, Mode::from_raw_mode(about.mode & 0o777)).map_err(errno::<F>)
            }
            FileKind::File => self.get_file(from, about, to),
            FileKind::Other => self.has_skipped(),
        }
    }

    fn get_file(
        &mut self,
        from: &str,
        about: &FileStat,
        (folder, name): Place<'_>,
    ) -> Result<(), F::Error> {
        // Beside its place first: what is there stays until all of the copy is.
        let temporary = format!(".harvest-{}", random_name());
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            openat(folder, &*temporary, flags, Mode::from_raw_mode(0o600)).map_err(errno::<F>)?;
        let mut counted = Counted { file: file.into(), bytes: 0 };
        let whole = self.far.read(from, &mut counted).and_then(|()| {
            // Without set-id bits: whose it is inside says nothing about whom it would act for here.
            fchmod(counted.file.as_fd(), Mode::from_raw_mode(about.mode & 0o777))
                .map_err(errno::<F>)?;
            renameat(folder, &*temporary, folder, name).map_err(errno::<F>)
        });
        if let Err(error) = whole {
            let _ = unlinkat(folder, &*temporary, AtFlags::empty());
            return Err(error);
        }
        self.has_copied(counted.bytes)
    }

    fn has_copied(&mut self, bytes: u64) -> Result<(), F::Error> {
        self.copied.files += 1;
        self.copied.bytes += bytes;
        Ok(())
    }

    fn has_skipped(&mut self) -> Result<(), F::Error> {
        self.copied.skipped += 1;
        Ok(())
    }
}

/// A name in a folder of the host.
type Place<'a> = (&'a OwnedFd, &'a Path);

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
fn replace<F: Far>(folder: &OwnedFd, name: &Path) -> Result<(), F::Error> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(errno::<F>(error)),
    }
}

/// Opens a folder, made if it is missing. A link in its place is not followed.
fn enter(folder: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    match mkdirat(folder, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(folder, name, flags, Mode::empty())?)
}

/// Whether a name is one part of a path and nothing else.
fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

fn join(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

fn text<F: Far>(name: &std::ffi::OsStr) -> Result<&str, F::Error> {
    name.to_str().ok_or_else(|| local::<F>("a name is not UTF-8, which the bridge cannot carry"))
}

fn local<F: Far>(words: &'static str) -> F::Error {
    F::local(io::Error::new(io::ErrorKind::InvalidInput, words))
}

fn errno<F: Far>(error: Errno) -> F::Error {
    F::local(error.into())
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
