//! Copies trees between the host and a sandbox, without a shell inside. Content from a sandbox is
//! untrusted: every name is checked, host folders are opened by descriptor and no link is followed,
//! so nothing is written outside the target. Set-id bits are dropped.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

use harvest_proto::bridge::{FileKind, FileStat};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fchmod, mkdirat, openat, renameat, symlinkat, unlinkat},
    io::Errno,
};

use crate::records::random_name;

/// Deeper than real trees, and shallow enough for the stack: the copy recurses.
const MAX_DEPTH: usize = 256;

/// What a copy transferred.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopiedTree {
    /// Regular files copied.
    pub files: u64,
    /// Bytes of content copied.
    pub bytes: u64,
    /// Paths of sockets, pipes and devices, which are not copied.
    pub special: Vec<String>,
    /// Paths whose name or link target is not UTF-8. They are not copied: the protocol has no form
    /// for them. The invalid bytes are replaced.
    pub not_utf8: Vec<String>,
}

/// The remote side of a copy: the files of a sandbox by path, over any transport.
pub trait RemoteFs {
    /// The transport's error.
    type Error;

    /// Wraps an error of the local side.
    fn local(error: io::Error) -> Self::Error;

    /// Whether the error means that the path does not exist.
    fn is_missing(error: &Self::Error) -> bool;

    /// The metadata of a path. A symbolic link is not followed.
    ///
    /// # Errors
    /// When the path does not exist.
    fn stat(&mut self, path: &str) -> Result<FileStat, Self::Error>;

    /// All entries of a folder, over several requests if need be. A link to a folder is followed.
    ///
    /// # Errors
    /// When the path is not a folder.
    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>, Self::Error>;

    /// Reads a file into `to`.
    ///
    /// # Errors
    /// When the file does not exist, or `to` fails.
    fn read(&mut self, path: &str, to: &mut dyn io::Write) -> Result<(), Self::Error>;

    /// Writes a file. The file has its final name when this returns.
    ///
    /// # Errors
    /// When the file cannot be written, or `from` fails.
    fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn io::Read,
    ) -> Result<(), Self::Error>;

    /// Creates a folder. An existing one is left as it is.
    ///
    /// # Errors
    /// When the folder cannot be created.
    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>)
    -> Result<(), Self::Error>;

    /// Creates a symbolic link, replacing a file or link of that name.
    ///
    /// # Errors
    /// When the link cannot be created.
    fn make_link(
        &mut self,
        path: &str,
        target: &str,
        user: Option<&str>,
    ) -> Result<(), Self::Error>;
}

/// Copies a file, link or folder of the host to `to`, which names the copy itself. Existing folders
/// are merged into; files are replaced. `user` owns the copies; without one, the remote default.
///
/// # Errors
/// When the source cannot be read or the target cannot be written.
pub fn copy_in<F: RemoteFs>(
    remote: &mut F,
    from: &Path,
    to: &str,
    user: Option<&str>,
) -> Result<CopiedTree, F::Error> {
    let mut copying = TreeCopy::new(remote);
    copying.put(from, to, user, 0)?;
    Ok(copying.copied)
}

/// Copies a file, link or folder of the sandbox to `to`, which names the copy itself. Existing
/// folders are merged into; files are replaced.
///
/// # Errors
/// When the source cannot be read or the target cannot be written.
pub fn copy_out<F: RemoteFs>(
    remote: &mut F,
    from: &str,
    to: &Path,
) -> Result<CopiedTree, F::Error> {
    let name = to.file_name().ok_or_else(|| local::<F>("the target path has no file name"))?;
    let folder =
        to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The user named this folder, so links in its path are followed.
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = openat(CWD, folder, flags, Mode::empty()).map_err(errno::<F>)?;
    let stat = remote.stat(from)?;
    let mut copying = TreeCopy::new(remote);
    copying.get(from, &stat, (&folder, Path::new(name)), 0)?;
    Ok(copying.copied)
}

/// A copy in progress.
struct TreeCopy<'a, F> {
    remote: &'a mut F,
    copied: CopiedTree,
}

impl<'a, F: RemoteFs> TreeCopy<'a, F> {
    fn new(remote: &'a mut F) -> Self {
        Self { remote, copied: CopiedTree::default() }
    }

    fn put(
        &mut self,
        from: &Path,
        to: &str,
        user: Option<&str>,
        depth: usize,
    ) -> Result<(), F::Error> {
        let metadata = fs::symlink_metadata(from).map_err(F::local)?;
        let mode = metadata.mode() & 0o7777;
        if metadata.is_symlink() {
            match fs::read_link(from).map_err(F::local)?.to_str() {
                Some(target) => self.remote.make_link(to, target, user),
                None => {
                    self.copied.not_utf8.push(from.to_string_lossy().into_owned());
                    Ok(())
                }
            }
        } else if metadata.is_dir() {
            if depth >= MAX_DEPTH {
                return Err(local::<F>("the tree is too deep"));
            }
            self.remote.make_folder(to, mode, user)?;
            for entry in fs::read_dir(from).map_err(F::local)? {
                let entry = entry.map_err(F::local)?;
                match entry.file_name().to_str() {
                    Some(name) => self.put(&entry.path(), &join(to, name), user, depth + 1)?,
                    None => {
                        self.copied.not_utf8.push(entry.path().to_string_lossy().into_owned());
                    }
                }
            }
            Ok(())
        } else if metadata.is_file() {
            // Non-blocking: the file may have been replaced by a pipe since.
            let open = File::options()
                .read(true)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(from);
            self.remote.write(to, mode, user, &mut open.map_err(F::local)?)?;
            self.count_file(metadata.len());
            Ok(())
        } else {
            self.copied.special.push(from.to_string_lossy().into_owned());
            Ok(())
        }
    }

    fn get(
        &mut self,
        from: &str,
        stat: &FileStat,
        to: HostTarget<'_>,
        depth: usize,
    ) -> Result<(), F::Error> {
        let (folder, name) = to;
        match stat.kind {
            FileKind::Link => match &stat.target {
                Some(target) => {
                    remove_existing::<F>(folder, name)?;
                    symlinkat(target.as_str(), folder, name).map_err(errno::<F>)
                }
                None => {
                    self.copied.not_utf8.push(from.to_owned());
                    Ok(())
                }
            },
            FileKind::Folder if depth >= MAX_DEPTH => Err(local::<F>("the tree is too deep")),
            FileKind::Folder => {
                let inner = open_or_create(folder, name).map_err(F::local)?;
                for entry in self.remote.list_all(from)? {
                    if !is_single_component(&entry.name) {
                        return Err(local::<F>("the sandbox sent an invalid file name"));
                    }
                    let inside = join(from, &entry.name);
                    self.get(&inside, &entry, (&inner, Path::new(&entry.name)), depth + 1)?;
                }
                fchmod(&inner, Mode::from_raw_mode(stat.mode & 0o777)).map_err(errno::<F>)
            }
            FileKind::File => self.get_file(from, stat, to),
            FileKind::Other => {
                self.copied.special.push(from.to_owned());
                Ok(())
            }
            FileKind::NotUtf8 => {
                self.copied.not_utf8.push(from.to_owned());
                Ok(())
            }
        }
    }

    fn get_file(
        &mut self,
        from: &str,
        stat: &FileStat,
        (folder, name): HostTarget<'_>,
    ) -> Result<(), F::Error> {
        // Written to a temporary name first, so an existing file stays until the copy is complete.
        let temporary = format!(".harvest-{}", random_name());
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            openat(folder, &*temporary, flags, Mode::from_raw_mode(0o600)).map_err(errno::<F>)?;
        let mut counted = CountingWriter { file: file.into(), bytes: 0 };
        let result = self.remote.read(from, &mut counted).and_then(|()| {
            // Set-id bits are dropped: the file's owner inside is another user on the host.
            fchmod(counted.file.as_fd(), Mode::from_raw_mode(stat.mode & 0o777))
                .map_err(errno::<F>)?;
            renameat(folder, &*temporary, folder, name).map_err(errno::<F>)
        });
        if let Err(error) = result {
            let _ = unlinkat(folder, &*temporary, AtFlags::empty());
            return Err(error);
        }
        self.count_file(counted.bytes);
        Ok(())
    }

    fn count_file(&mut self, bytes: u64) {
        self.copied.files += 1;
        self.copied.bytes += bytes;
    }
}

/// A name in an open folder of the host.
type HostTarget<'a> = (&'a OwnedFd, &'a Path);

struct CountingWriter {
    file: File,
    bytes: u64,
}

impl io::Write for CountingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Removes a file or link so that a new link can take its name. A folder makes the copy fail.
fn remove_existing<F: RemoteFs>(folder: &OwnedFd, name: &Path) -> Result<(), F::Error> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(errno::<F>(error)),
    }
}

/// Opens a folder, creating it if it is missing. A symbolic link is not followed.
fn open_or_create(folder: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    match mkdirat(folder, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(folder, name, flags, Mode::empty())?)
}

/// Whether a name is exactly one path component.
fn is_single_component(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

fn join(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

fn local<F: RemoteFs>(message: &'static str) -> F::Error {
    F::local(io::Error::new(io::ErrorKind::InvalidInput, message))
}

fn errno<F: RemoteFs>(error: Errno) -> F::Error {
    F::local(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_must_be_a_single_path_component() {
        for name in ["", ".", "..", "a/b", "/etc", "a\0b", "../x"] {
            assert!(!is_single_component(name), "{name:?}");
        }
        for name in ["...", "a b", "-rf"] {
            assert!(is_single_component(name), "{name:?}");
        }
    }

    #[test]
    fn links_in_place_of_folders_are_refused() {
        let host = tempfile::tempdir().unwrap();
        let (target, elsewhere) = (host.path().join("target"), host.path().join("elsewhere"));
        fs::create_dir(&target).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, target.join("trap")).unwrap();
        let folder: OwnedFd = File::open(&target).unwrap().into();
        assert!(open_or_create(&folder, Path::new("trap")).is_err());
        assert!(open_or_create(&folder, Path::new("honest")).is_ok());
    }
}
