//! Reading and copying trees whose content is hostile: every step goes through a descriptor, no
//! link is ever followed, no other file system is entered, and depth costs neither stack nor
//! descriptors. Knows nothing of layers.

mod trail;

use std::{
    collections::HashMap,
    ffi::{CStr, CString, OsStr},
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        self, AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, SeekFrom, Stat, Timespec,
        Timestamps, Uid, XattrFlags,
    },
    io::Errno,
};

use crate::{EngineError, disk::disk_error, rootless};
pub(crate) use trail::Trail;

/// The names of overlay's own notes.
struct Notes {
    /// Makes a folder hide what lies below it in the stack.
    opaque: &'static CStr,
    /// What overlay writes when it moves a lower folder by reference or copies only metadata up. Such
    /// an upper does not stand for itself; our mounts turn both off.
    by_reference: [&'static CStr; 2],
}

const NOTES: Notes = Notes {
    opaque: c"trusted.overlay.opaque",
    by_reference: [c"trusted.overlay.redirect", c"trusted.overlay.metacopy"],
};

// Only the host's root may read and write the others.
const ROOTLESS_NOTES: Notes = Notes {
    opaque: c"user.overlay.opaque",
    by_reference: [c"user.overlay.redirect", c"user.overlay.metacopy"],
};

// With every name of those notes, also of ones that do not concern us.
const ROOTLESS_PREFIX: &[u8] = b"user.overlay.";

fn notes() -> &'static Notes {
    if rootless::is_here() { &ROOTLESS_NOTES } else { &NOTES }
}

// What a copy keeps besides: data of the owner, file capabilities, access lists. Everything else
// (labels of the host, overlay's own notes) describes the original only.
const KEPT_XATTRS: [&[u8]; 3] = [b"user.", b"security.capability", b"system.posix_acl_"];

// PATH_MAX with its final zero.
const MAX_PATH_BYTES: usize = 4096;

// 4 MiB a step: long enough to be fast, short enough to notice a freeze that must be renewed.
const COPY_STEP_BYTES: usize = 4 << 20;

// Below this one read and one write beat the search for holes.
const SMALL_FILE_BYTES: usize = 64 << 10;

/// Opens the folder a walk starts at. The path is ours; what is in it is not.
pub(crate) fn open_root(path: &Path) -> Result<OwnedFd, EngineError> {
    fs::open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| disk_error("open the folder", path, e))
}

/// Opens a folder below `root`, refusing links anywhere on the way.
pub(crate) fn open_folder(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let within = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    retried(|| fs::openat2(root, path, flags, Mode::empty(), within))
}

// openat2 answers EAGAIN when something was renamed on its way; that passes.
fn retried<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

/// The names in a folder, sorted, without itself and its parent.
pub(crate) fn names(folder: BorrowedFd<'_>) -> Result<Vec<CString>, Errno> {
    first_names(folder, usize::MAX).map(|(names, _)| names)
}

/// So many of them at most, and whether they are all.
pub(crate) fn first_names(
    folder: BorrowedFd<'_>,
    most: usize,
) -> Result<(Vec<CString>, bool), Errno> {
    let (mut names, mut all) = (Vec::new(), true);
    for entry in fs::Dir::read_from(folder)? {
        let entry = entry?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        if names.len() == most {
            all = false;
            break;
        }
        names.push(entry.file_name().to_owned());
    }
    names.sort_unstable();
    Ok((names, all))
}

/// What a name in a folder is, without following it.
pub(crate) fn stat(folder: BorrowedFd<'_>, name: &CStr) -> Result<Stat, Errno> {
    fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Whether overlay reads this as "nothing is here".
pub(crate) fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Whether a folder hides what lies below it in the stack.
///
/// # Errors
/// Also when it stands for a folder below by reference, which no copy can keep.
pub(crate) fn is_opaque(folder: BorrowedFd<'_>) -> Result<bool, Errno> {
    if notes()
        .by_reference
        .iter()
        .any(|name| xattr(folder, name).is_ok_and(|value| value.is_some()))
    {
        return Err(Errno::NOTSUP);
    }
    // `x` only says that the folder holds whiteouts of another form, which are regular files to us.
    Ok(xattr(folder, notes().opaque)?.as_deref() == Some(b"y"))
}

fn xattr(file: BorrowedFd<'_>, name: &CStr) -> Result<Option<Vec<u8>>, Errno> {
    let mut value = [0; 64];
    match fs::fgetxattr(file, name, &mut value) {
        Ok(length) => Ok(Some(value[..length].to_vec())),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
        Err(Errno::RANGE) => Ok(Some(Vec::new())),
        Err(error) => Err(error),
    }
}

/// Appends a name to a path.
pub(crate) fn join(folder: &Path, name: &CStr) -> PathBuf {
    folder.join(OsStr::from_bytes(name.to_bytes()))
}

/// Calls `each` with the path (relative to `root`), its folder and its stat, for everything below `root`.
pub(crate) fn visit(
    root: &Path,
    each: &mut dyn FnMut(&Path, BorrowedFd<'_>, &Stat) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let failed = |doing, path: &Path, e: Errno| disk_error(doing, root.join(shown(path)), e);
    let mut at = PathBuf::new();
    let open = |e| failed("open the folder", Path::new(""), e);
    let mut trail = Trail::new(open_root(root)?.as_fd()).map_err(open)?;
    // `None` stands for the way back up.
    let mut steps: Vec<Option<CString>> = vec![];
    loop {
        for name in names(trail.here()).map_err(|e| failed("list", &at, e))? {
            at.push(OsStr::from_bytes(name.to_bytes()));
            let stat = stat(trail.here(), &name).map_err(|e| failed("look at", &at, e))?;
            each(&at, trail.here(), &stat)?;
            at.pop();
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                steps.push(Some(name));
            }
        }
        loop {
            match steps.pop() {
                None => return Ok(()),
                Some(None) => {
                    trail.up().map_err(|e| failed("leave the folder", &at, e))?;
                    at.pop();
                }
                Some(Some(name)) => {
                    at.push(OsStr::from_bytes(name.to_bytes()));
                    trail.down(&name).map_err(|e| failed("open the folder", &at, e))?;
                    steps.push(None);
                    break;
                }
            }
        }
    }
}

/// A path as an error shows it: a hostile one may have a million bytes.
pub(crate) fn shown(path: &Path) -> PathBuf {
    const LONGEST: usize = 1024;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() <= LONGEST {
        return path.to_owned();
    }
    let (head, tail) = (&bytes[..LONGEST / 2], &bytes[bytes.len() - LONGEST / 2..]);
    PathBuf::from(OsStr::from_bytes(&[head, "…".as_bytes(), tail].concat()))
}

/// Copies single files, keeping owner, mode, times, attributes, holes, and names that share a file.
pub(crate) struct Copier<'a> {
    /// Where copies go.
    pub(crate) target: BorrowedFd<'a>,
    /// Called between steps of long work; its error ends the copying.
    pub(crate) pulse: &'a mut dyn FnMut() -> Result<(), EngineError>,
    /// Files with several names, by inode: where their copy is.
    pub(crate) links: HashMap<u64, PathBuf>,
    /// Bytes of content copied.
    pub(crate) bytes: u64,
    clones: bool,
    buffer: Vec<u8>,
}

impl<'a> Copier<'a> {
    /// A copier into `target`.
    pub(crate) fn new(
        target: BorrowedFd<'a>,
        pulse: &'a mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Self {
        Self {
            target,
            pulse,
            links: HashMap::new(),
            bytes: 0,
            clones: true,
            buffer: vec![0; SMALL_FILE_BYTES],
        }
    }

    /// Copies `name` of the folder `from` to `path` in the target, whose parent `into` is. Folders are
    /// the caller's business; a socket becomes one nobody listens on, as after a restart.
    pub(crate) fn copy(
        &mut self,
        from: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
        into: BorrowedFd<'_>,
        path: &Path,
    ) -> Result<(), EngineError> {
        let shared =
            stat.st_nlink > 1 && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if shared && let Some(first) = self.links.get(&stat.st_ino) {
            // A file system's limit of names per file is no reason to fail: then it is copied.
            if fs::linkat(self.target, first, into, name, AtFlags::empty()).is_ok() {
                return Ok(());
            }
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.copy_file(from, name, into, path)?,
            _ => copy_special(from, name, stat, into)
                .map_err(|e| disk_error("copy", shown(path), e))?,
        }
        // Where no path is long enough to lead there, the next name gets a copy of its own.
        if shared && path.as_os_str().len() < MAX_PATH_BYTES {
            self.links.insert(stat.st_ino, path.to_owned());
        }
        (self.pulse)()
    }

    fn copy_file(
        &mut self,
        from: BorrowedFd<'_>,
        name: &CStr,
        into: BorrowedFd<'_>,
        path: &Path,
    ) -> Result<(), EngineError> {
        let failed = |e: Errno| disk_error("copy", shown(path), e);
        // Non-blocking: should this be a pipe after all, opening it must not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let source = fs::openat(from, name, flags, Mode::empty()).map_err(failed)?;
        let stat = fs::fstat(&source).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(failed(Errno::INVAL));
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let copy = fs::openat(into, name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        start_write_back(source.as_fd());
        self.copy_content(&source, &copy, &stat, path)?;
        copy_file_metadata(source.as_fd(), copy.as_fd(), &stat).map_err(failed)
    }

    fn copy_content(
        &mut self,
        source: &OwnedFd,
        copy: &OwnedFd,
        stat: &Stat,
        path: &Path,
    ) -> Result<(), EngineError> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let stored = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        self.bytes += stored.min(size);
        if size == 0 {
            return Ok(());
        }
        if self.clones {
            match fs::ioctl_ficlone(copy, source) {
                Ok(()) => return Ok(()),
                // This file system shares no blocks: not asked again.
                Err(_) => self.clones = false,
            }
        }
        if size <= SMALL_FILE_BYTES as u64 && stored >= size {
            return self.copy_small(source, copy).map_err(|e| disk_error("copy", shown(path), e));
        }
        fs::ftruncate(copy, size).map_err(|e| disk_error("copy", shown(path), e))?;
        let mut position = 0;
        while position < size {
            let Some((start, end)) = next_data(source.as_fd(), position, size)
                .map_err(|e| disk_error("copy", shown(path), e))?
            else {
                break;
            };
            position = self.copy_range(source, copy, start, end, path)?;
        }
        Ok(())
    }

    fn copy_small(&mut self, source: &OwnedFd, copy: &OwnedFd) -> std::io::Result<()> {
        let (mut source, mut copy) =
            (File::from(source.try_clone()?), File::from(copy.try_clone()?));
        loop {
            match source.read(&mut self.buffer)? {
                0 => return Ok(()),
                length => copy.write_all(&self.buffer[..length])?,
            }
        }
    }

    fn copy_range(
        &mut self,
        source: &OwnedFd,
        copy: &OwnedFd,
        start: u64,
        end: u64,
        path: &Path,
    ) -> Result<u64, EngineError> {
        let (mut read, mut written) = (start, start);
        while read < end {
            let length =
                usize::try_from(end - read).unwrap_or(COPY_STEP_BYTES).min(COPY_STEP_BYTES);
            match fs::copy_file_range(source, Some(&mut read), copy, Some(&mut written), length) {
                // The file became shorter under us; a frozen one does not.
                Ok(0) => return Ok(u64::MAX),
                Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(disk_error("copy", shown(path), error)),
            }
            (self.pulse)()?;
        }
        Ok(end)
    }
}

// Pages dirtied through a mapping stay writable without another fault, and only a fault moves the
// ctime. Write-back takes that right away, so the next write shows.
fn start_write_back(file: BorrowedFd<'_>) {
    // SAFETY: plain integers go in and the descriptor is borrowed for the length of the call.
    unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            0,
            0,
            libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE,
        );
    }
}

fn next_data(file: BorrowedFd<'_>, position: u64, size: u64) -> Result<Option<(u64, u64)>, Errno> {
    match fs::seek(file, SeekFrom::Data(position)) {
        Ok(start) => Ok(Some((start, fs::seek(file, SeekFrom::Hole(start))?.min(size)))),
        // Nothing but a hole up to the end.
        Err(Errno::NXIO) => Ok(None),
        // No such search here: all of it is data.
        Err(Errno::INVAL) => Ok(Some((position, size))),
        Err(error) => Err(error),
    }
}

fn copy_special(
    from: BorrowedFd<'_>,
    name: &CStr,
    stat: &Stat,
    into: BorrowedFd<'_>,
) -> Result<(), Errno> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind == FileType::Symlink {
        let target = fs::readlinkat(from, name, Vec::new())?;
        fs::symlinkat(&target, into, name)?;
    } else {
        fs::mknodat(into, name, kind, Mode::from_raw_mode(stat.st_mode), stat.st_rdev)?;
    }
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    fs::chownat(into, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    if kind != FileType::Symlink {
        // Just made by us in a folder of ours, and not a link: the name cannot lead elsewhere.
        fs::chmodat(into, name, Mode::from_raw_mode(stat.st_mode), AtFlags::empty())?;
    }
    fs::utimensat(into, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)
}

/// Gives an open file or folder the owner, mode, kept attributes and times of another.
pub(crate) fn copy_file_metadata(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    stat: &Stat,
) -> Result<(), Errno> {
    fs::fchown(to, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    // After the owner, whose change takes set-uid bits and capabilities away.
    fs::fchmod(to, Mode::from_raw_mode(stat.st_mode))?;
    copy_xattrs(from, to)?;
    fs::futimens(to, &times(stat))
}

fn copy_xattrs(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    // 64 KiB: the kernel's own limits for a list of names and for a value.
    let mut list = Vec::new();
    match fs::flistxattr_query(from) {
        Ok(0) | Err(Errno::NOTSUP) => return Ok(()),
        _ => list.resize(1 << 16, 0),
    }
    let length = fs::flistxattr(from, &mut list[..])?;
    for name in list[..length].split_inclusive(|byte| *byte == 0) {
        let of_overlay = rootless::is_here() && name.starts_with(ROOTLESS_PREFIX);
        if of_overlay || !KEPT_XATTRS.iter().any(|kept| name.starts_with(kept)) {
            continue;
        }
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        let mut value = vec![0; 1 << 16];
        let length = fs::fgetxattr(from, name, &mut value[..])?;
        fs::fsetxattr(to, name, &value[..length], XattrFlags::empty())?;
    }
    Ok(())
}

fn times(stat: &Stat) -> Timestamps {
    let spec = |seconds, nanos: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanos).unwrap_or(0),
    };
    Timestamps {
        last_access: spec(stat.st_atime, stat.st_atime_nsec),
        last_modification: spec(stat.st_mtime, stat.st_mtime_nsec),
    }
}

/// Creates the file that says "nothing is here".
pub(crate) fn make_whiteout(folder: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    fs::mknodat(folder, name, FileType::CharacterDevice, Mode::empty(), 0)
}

/// Makes a folder hide what lies below it in the stack.
pub(crate) fn make_opaque(folder: BorrowedFd<'_>) -> Result<(), Errno> {
    fs::fsetxattr(folder, notes().opaque, b"y", XattrFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_the_owners_attributes_and_leaves_those_of_the_place() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let set = |name: &CStr| fs::fsetxattr(&from, name, b"value", XattrFlags::empty());
        set(c"user.mine").unwrap();
        set(c"trusted.overlay.origin").unwrap();
        let stat = fs::fstat(&from).unwrap();
        copy_file_metadata(from.as_fd(), to.as_fd(), &stat).unwrap();
        assert_eq!(xattr(to.as_fd(), c"user.mine").unwrap().as_deref(), Some(&b"value"[..]));
        assert_eq!(xattr(to.as_fd(), c"trusted.overlay.origin").unwrap(), None);
    }
}
