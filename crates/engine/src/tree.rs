//! Reads and copies trees with untrusted content: every step goes through a descriptor, no link is
//! followed, no other file system is entered, and deep trees need neither stack nor descriptors.

mod dir_stack;

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

use crate::{EngineError, error::AtPath, rootless};
pub(crate) use dir_stack::DirStack;

// The prefix of all overlayfs attributes without root: the mount option `userxattr`.
const ROOTLESS_PREFIX: &[u8] = b"user.overlay.";

/// The extended attribute of overlayfs that marks a folder which hides the lower layers.
fn opaque_xattr() -> &'static CStr {
    if rootless::is_active() { c"user.overlay.opaque" } else { c"trusted.overlay.opaque" }
}

/// The attributes of a moved folder (redirect) and a metadata-only copy-up (metacopy). An upper
/// layer with these is not self-contained; our mounts turn both features off.
fn reference_xattrs() -> [&'static CStr; 2] {
    if rootless::is_active() {
        [c"user.overlay.redirect", c"user.overlay.metacopy"]
    } else {
        [c"trusted.overlay.redirect", c"trusted.overlay.metacopy"]
    }
}

// A copy keeps user attributes, file capabilities and ACLs. All others (security labels of the
// host, overlayfs's own) describe only the original.
const COPIED_XATTRS: [&[u8]; 3] = [b"user.", b"security.capability", b"system.posix_acl_"];

// PATH_MAX, including the terminating zero.
const MAX_PATH_BYTES: usize = 4096;

// 4 MiB per step: large enough to be fast, small enough to renew a freeze in time.
const COPY_STEP_BYTES: usize = 4 << 20;

// Up to this size, one read and one write are faster than searching for holes.
const SMALL_FILE_BYTES: usize = 64 << 10;

// RDONLY is zero, but says what the descriptor is for.
const FOLDER_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens the folder a walk starts at. The path is trusted; the folder's content is not.
pub fn open_root(path: &Path) -> Result<OwnedFd, EngineError> {
    fs::open(path, FOLDER_FLAGS, Mode::empty()).at("open the folder", path)
}

/// Opens a subfolder by its name. A symbolic link is refused.
pub(crate) fn open_subfolder(folder: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    fs::openat(folder, name, FOLDER_FLAGS, Mode::empty())
}

/// Opens a folder below `root`; refuses links in every component of `path`.
pub fn open_folder(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let within = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    loop {
        match fs::openat2(root, path, FOLDER_FLAGS, Mode::empty(), within) {
            // EAGAIN: a component was renamed during the lookup; a retry succeeds.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

/// The names in a folder, sorted, without `.` and `..`.
pub(crate) fn names(folder: BorrowedFd<'_>) -> Result<Vec<CString>, Errno> {
    first_names(folder, usize::MAX).map(|(names, _)| names)
}

/// At most `limit` names of a folder, sorted, and whether these are all.
pub(crate) fn first_names(
    folder: BorrowedFd<'_>,
    limit: usize,
) -> Result<(Vec<CString>, bool), Errno> {
    let (mut names, mut complete) = (Vec::new(), true);
    for entry in fs::Dir::read_from(folder)? {
        let entry = entry?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        if names.len() == limit {
            complete = false;
            break;
        }
        names.push(entry.file_name().to_owned());
    }
    names.sort_unstable();
    Ok((names, complete))
}

/// The metadata of a name in a folder. A symbolic link is not followed.
pub fn stat(folder: BorrowedFd<'_>, name: &CStr) -> Result<Stat, Errno> {
    fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Whether overlayfs treats the file as a whiteout: a deleted name.
pub fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Whether a folder is opaque: it hides the lower layers.
///
/// # Errors
/// Also when the folder refers to a lower one (redirect or metacopy), which a copy cannot
/// represent.
pub fn is_opaque(folder: BorrowedFd<'_>) -> Result<bool, Errno> {
    if reference_xattrs().iter().any(|name| matches!(xattr(folder, name), Ok(Some(_)))) {
        return Err(Errno::NOTSUP);
    }
    // `x` marks a folder with xattr whiteouts, which count as regular files here.
    Ok(xattr(folder, opaque_xattr())?.as_deref() == Some(b"y"))
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

/// Walks the tree below `root` and calls `each` with every entry's path relative to `root`, its
/// open parent folder and its metadata.
pub fn visit<E: From<EngineError>>(
    root: &Path,
    each: &mut dyn FnMut(&Path, BorrowedFd<'_>, &Stat) -> Result<(), E>,
) -> Result<(), E> {
    let failed =
        |doing, path: &Path, e: Errno| EngineError::file(doing, root.join(truncate_path(path)), e);
    let mut at = PathBuf::new();
    let open = |e| failed("open the folder", Path::new(""), e);
    let mut dirs = DirStack::new(open_root(root)?.as_fd()).map_err(open)?;
    // `None` means: ascend.
    let mut steps: Vec<Option<CString>> = vec![];
    loop {
        for name in names(dirs.current()).map_err(|e| failed("list", &at, e))? {
            at.push(OsStr::from_bytes(name.to_bytes()));
            let stat = stat(dirs.current(), &name).map_err(|e| failed("access", &at, e))?;
            each(&at, dirs.current(), &stat)?;
            at.pop();
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                steps.push(Some(name));
            }
        }
        loop {
            match steps.pop() {
                None => return Ok(()),
                Some(None) => {
                    dirs.ascend().map_err(|e| failed("leave the folder", &at, e))?;
                    at.pop();
                }
                Some(Some(name)) => {
                    at.push(OsStr::from_bytes(name.to_bytes()));
                    dirs.descend(&name).map_err(|e| failed("open the folder", &at, e))?;
                    steps.push(None);
                    break;
                }
            }
        }
    }
}

/// Shortens a path for an error message: an untrusted path may have a million bytes.
pub fn truncate_path(path: &Path) -> PathBuf {
    const MAX_BYTES: usize = 1024;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() <= MAX_BYTES {
        return path.to_owned();
    }
    let (head, tail) = (&bytes[..MAX_BYTES / 2], &bytes[bytes.len() - MAX_BYTES / 2..]);
    PathBuf::from(OsStr::from_bytes(&[head, "…".as_bytes(), tail].concat()))
}

/// Copies one file that is no folder into the folder `into`, under its own name.
pub fn copy_one(
    from: BorrowedFd<'_>,
    name: &CStr,
    stat: &Stat,
    into: BorrowedFd<'_>,
) -> Result<(), EngineError> {
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    Copier::new(into, &mut || Ok(())).copy(from, name, stat, into, path)
}

/// Copies single files with their owner, mode, times, attributes, holes and hard links.
pub(crate) struct Copier<'a> {
    pub(crate) target: BorrowedFd<'a>,
    /// Called between the steps of a long copy; an error aborts the copy.
    pub(crate) heartbeat: &'a mut dyn FnMut() -> Result<(), EngineError>,
    /// The copy's path for each inode with several names.
    pub(crate) links: HashMap<u64, PathBuf>,
    /// Bytes of content copied.
    pub(crate) bytes: u64,
    /// Whether the file system can share blocks between files (reflinks).
    can_reflink: bool,
    buffer: Vec<u8>,
}

impl<'a> Copier<'a> {
    pub(crate) fn new(
        target: BorrowedFd<'a>,
        heartbeat: &'a mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Self {
        Self {
            target,
            heartbeat,
            links: HashMap::new(),
            bytes: 0,
            can_reflink: true,
            buffer: vec![0; SMALL_FILE_BYTES],
        }
    }

    /// Copies `name` of the folder `from` to `path` in the target, where `into` is the open parent.
    /// Not for folders. The copy of a socket has no listener, as after a restart.
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
            // At the file system's limit of links per file, the content is copied instead.
            if fs::linkat(self.target, first, into, name, AtFlags::empty()).is_ok() {
                return Ok(());
            }
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.copy_file(from, name, into, path)?,
            _ => copy_special(from, name, stat, into).at("copy", truncate_path(path))?,
        }
        // A path that is too long cannot be linked to; the next name gets a copy of the content.
        if shared && path.as_os_str().len() < MAX_PATH_BYTES {
            self.links.insert(stat.st_ino, path.to_owned());
        }
        (self.heartbeat)()
    }

    fn copy_file(
        &mut self,
        from: BorrowedFd<'_>,
        name: &CStr,
        into: BorrowedFd<'_>,
        path: &Path,
    ) -> Result<(), EngineError> {
        let failed = |e: Errno| EngineError::file("copy", truncate_path(path), e);
        // Non-blocking: if the file was replaced by a pipe, the open must not wait for a writer.
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
        if self.can_reflink {
            match fs::ioctl_ficlone(copy, source) {
                Ok(()) => return Ok(()),
                Err(_) => self.can_reflink = false,
            }
        }
        if size <= SMALL_FILE_BYTES as u64 && stored >= size {
            return self.copy_small(source, copy).at("copy", truncate_path(path));
        }
        fs::ftruncate(copy, size).at("copy", truncate_path(path))?;
        let mut position = 0;
        while position < size {
            let data = next_data(source.as_fd(), position, size).at("copy", truncate_path(path))?;
            let Some((start, end)) = data else { break };
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
                // The file was truncated during the copy; that cannot happen while frozen.
                Ok(0) => return Ok(u64::MAX),
                Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(EngineError::file("copy", truncate_path(path), error)),
            }
            (self.heartbeat)()?;
        }
        Ok(end)
    }
}

// A page dirtied through a mapping stays writable, and only a page fault updates the ctime.
// Writeback write-protects the page again, so the next write changes the ctime.
fn start_write_back(file: BorrowedFd<'_>) {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE;
    // SAFETY: the arguments are plain integers and the descriptor is borrowed for the call.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) };
}

fn next_data(file: BorrowedFd<'_>, position: u64, size: u64) -> Result<Option<(u64, u64)>, Errno> {
    match fs::seek(file, SeekFrom::Data(position)) {
        Ok(start) => Ok(Some((start, fs::seek(file, SeekFrom::Hole(start))?.min(size)))),
        // The rest of the file is a hole.
        Err(Errno::NXIO) => Ok(None),
        // The file system does not support SEEK_DATA: everything counts as data.
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
        // Safe to follow: this process just created the name in its own folder, and not as a link.
        fs::chmodat(into, name, Mode::from_raw_mode(stat.st_mode), AtFlags::empty())?;
    }
    fs::utimensat(into, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)
}

/// Copies owner, mode, extended attributes and times from one open file or folder to another.
pub fn copy_file_metadata(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    stat: &Stat,
) -> Result<(), Errno> {
    fs::fchown(to, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    // After chown, which clears set-uid bits and capabilities.
    fs::fchmod(to, Mode::from_raw_mode(stat.st_mode))?;
    copy_xattrs(from, to)?;
    fs::futimens(to, &times(stat))
}

fn copy_xattrs(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    // 64 KiB: the kernel's limit for the list of names and for a value.
    if matches!(fs::flistxattr_query(from), Ok(0) | Err(Errno::NOTSUP)) {
        return Ok(());
    }
    let mut list = vec![0; 1 << 16];
    let length = fs::flistxattr(from, &mut list[..])?;
    for name in list[..length].split_inclusive(|byte| *byte == 0) {
        let of_overlay = rootless::is_active() && name.starts_with(ROOTLESS_PREFIX);
        if of_overlay || !COPIED_XATTRS.iter().any(|prefix| name.starts_with(prefix)) {
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

/// Creates a whiteout: overlayfs shows the name as deleted.
pub fn make_whiteout(folder: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    fs::mknodat(folder, name, FileType::CharacterDevice, Mode::empty(), 0)
}

/// Marks a folder as opaque: it hides the lower layers.
pub fn make_opaque(folder: BorrowedFd<'_>) -> Result<(), Errno> {
    fs::fsetxattr(folder, opaque_xattr(), b"y", XattrFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_keep_user_attributes_but_not_overlay_ones() {
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
