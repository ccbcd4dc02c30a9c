//! Puts one entry of an archive after the other into the layer.

use std::{
    ffi::{CString, OsStr},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};

use super::{
    Form, UnpackError, UnpackLimits, Unpacked, file_error,
    place::{Here, Places},
};
use crate::{
    EngineError,
    archive::{Archive, ArchiveError, Entry, Kind, read_some},
    disk, tree,
};

// The marks of OCI layers: "nothing is here", and "nothing of what lies below is here".
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE_MARK: &[u8] = b".wh..wh..opq";
const RESERVED: &[u8] = b".wh..wh.";

// PATH_MAX with its final zero.
const MAX_PATH_BYTES: usize = 4096;

// Folders get their times when nothing is put into them any more. Beyond this they get them at once,
// so that an archive of nothing but folders costs no more memory.
const MAX_LATE_BYTES: usize = 64 << 20;

// The last id a sandbox has.
const MAX_ID: u64 = 65_535;

/// Unpacks into one layer.
pub(super) struct Unpacker {
    places: Places,
    trash: OwnedFd,
    form: Form,
    limits: UnpackLimits,
    done: Unpacked,
    /// Folders and the times they get at the end.
    late: Vec<(PathBuf, Timestamps)>,
    late_bytes: usize,
    buffer: Vec<u8>,
}

impl Unpacker {
    /// Begins in the layer's empty root, which lies on `below` (top first).
    pub(super) fn new(
        root: OwnedFd,
        below: Vec<OwnedFd>,
        trash: OwnedFd,
        form: Form,
        limits: UnpackLimits,
    ) -> Self {
        Self {
            places: Places::new(root, below),
            trash,
            form,
            limits,
            done: Unpacked::default(),
            late: Vec::new(),
            late_bytes: 0,
            buffer: vec![0; 1 << 16],
        }
    }

    /// Unpacks everything, to the last byte of the source.
    pub(super) fn all(mut self, source: impl Read) -> Result<Unpacked, UnpackError> {
        let mut archive = Archive::new(source);
        while let Some(entry) = archive.next()? {
            self.entry(&entry, &mut archive)?;
            self.passed(archive.position())?;
        }
        self.finish();
        self.drain(archive)
    }

    fn entry(
        &mut self,
        entry: &Entry,
        archive: &mut Archive<impl Read>,
    ) -> Result<(), UnpackError> {
        self.done.entries += 1;
        if self.done.entries > self.limits.entries {
            return Err(UnpackError::Limit { limit: self.limits.entries, unit: "entries" });
        }
        let path = shown(&entry.path);
        let parts = parts(&entry.path).ok_or_else(|| UnpackError::Path { path: path.clone() })?;
        // The root itself is ours, whatever the archive says about it.
        let Some((name, folders)) = parts.split_last() else { return Ok(()) };
        for id in [entry.uid, entry.gid] {
            if id > MAX_ID {
                return Err(UnpackError::Owner { path, id });
            }
        }
        if entry.kind == Kind::Device {
            if folders.first().is_some_and(|first| *first == b"dev") {
                self.done.devices += 1;
                return Ok(());
            }
            return Err(UnpackError::Device { path });
        }
        let here = self.places.enter(folders).map_err(|e| file_error(&path, e))?;
        let made = if self.form == Form::Layer && name.starts_with(WHITEOUT) {
            self.mark(&here, name, &path)
        } else {
            self.make(&here, name, entry, archive, &path)
        };
        self.places.leave(here);
        made
    }

    fn mark(&mut self, here: &Here, name: &[u8], path: &Path) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        if name == OPAQUE_MARK {
            self.places.forget();
            return tree::make_opaque(here.own()).map_err(failed);
        }
        // Notes of an old file system about itself.
        if name.starts_with(RESERVED) {
            return Ok(());
        }
        let gone = &name[WHITEOUT.len()..];
        let (false, Ok(gone)) = (matches!(gone, b"" | b"." | b".."), CString::new(gone)) else {
            return Err(UnpackError::Path { path: path.to_owned() });
        };
        self.places.forget();
        // Marks are about the layers below only: what this layer has itself stays.
        match tree::stat(here.own(), &gone) {
            Err(Errno::NOENT) => tree::make_whiteout(here.own(), &gone).map_err(failed),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                let folder =
                    tree::open_folder(here.own(), Path::new(OsStr::from_bytes(gone.to_bytes())));
                folder.and_then(|folder| tree::make_opaque(folder.as_fd())).map_err(failed)
            }
            Ok(_) => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }

    fn make(
        &mut self,
        here: &Here,
        name: &[u8],
        entry: &Entry,
        archive: &mut Archive<impl Read>,
        path: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        let name = CString::new(name).map_err(|_| UnpackError::Path { path: path.to_owned() })?;
        if entry.kind == Kind::Folder {
            return self.folder(here, &name, entry).map_err(failed);
        }
        if entry.kind == Kind::HardLink {
            return self.hard_link(here, &name, entry, path);
        }
        self.clear(here, &name).map_err(failed)?;
        let mode = Mode::from_raw_mode(entry.mode);
        match entry.kind {
            Kind::File => return self.file(here, &name, entry, archive, path),
            Kind::Symlink => {
                fs::symlinkat(entry.link.as_slice(), here.own(), &name).map_err(failed)?
            }
            Kind::Fifo => {
                fs::mknodat(here.own(), &name, FileType::Fifo, mode, 0).map_err(failed)?;
            }
            Kind::Folder | Kind::HardLink | Kind::Device => {}
        }
        let (uid, gid) = owner(entry);
        let dress = || {
            fs::chownat(here.own(), &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            if entry.kind == Kind::Fifo {
                // Just made by us and no link: the name cannot lead elsewhere.
                fs::chmodat(here.own(), &name, mode, AtFlags::empty())?;
            }
            fs::utimensat(here.own(), &name, &times(entry), AtFlags::SYMLINK_NOFOLLOW)
        };
        dress().map_err(failed)
    }

    fn folder(&mut self, here: &Here, name: &CString, entry: &Entry) -> Result<(), Errno> {
        let folder = here.make_folder(name, &mut || self.clear(here, name))?;
        let (uid, gid) = owner(entry);
        fs::fchown(&folder, Some(uid), Some(gid))?;
        fs::fchmod(&folder, Mode::from_raw_mode(entry.mode))?;
        let path = here.path(name);
        if self.late_bytes < MAX_LATE_BYTES {
            self.late_bytes += path.as_os_str().len() + size_of::<(PathBuf, Timestamps)>();
            self.late.push((path, times(entry)));
            return Ok(());
        }
        fs::futimens(&folder, &times(entry))
    }

    fn hard_link(
        &mut self,
        here: &Here,
        name: &CString,
        entry: &Entry,
        path: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        let to = shown(&entry.link);
        let missing = || UnpackError::Link { path: path.to_owned(), to: to.clone() };
        let parts = parts(&entry.link).ok_or_else(|| UnpackError::Path { path: to.clone() })?;
        let (last, folders) = parts.split_last().ok_or_else(missing)?;
        let last = CString::new(*last).map_err(|_| missing())?;
        let there = self.places.enter(folders).map_err(failed)?;
        if there.path(&last) == here.path(name) {
            return Ok(());
        }
        let linkable = |stat: &fs::Stat| {
            matches!(
                FileType::from_raw_mode(stat.st_mode),
                FileType::RegularFile | FileType::Symlink
            )
        };
        match tree::stat(there.own(), &last) {
            Ok(stat) if linkable(&stat) => {
                self.clear(here, name).map_err(failed)?;
                fs::linkat(there.own(), &last, here.own(), name, AtFlags::empty()).map_err(failed)
            }
            Err(Errno::NOENT) => {
                // Only in a layer below, which stays as it is: a file of its own with that content.
                let (folder, stat) =
                    there.below(&last).filter(|(_, stat)| linkable(stat)).ok_or_else(missing)?;
                self.clear(here, name).map_err(failed)?;
                self.count(u64::try_from(stat.st_size).unwrap_or(0))?;
                copy_one(folder, &last, &stat, here, name).map_err(|e| file_error(path, e))
            }
            Ok(_) => Err(missing()),
            Err(error) => Err(failed(error)),
        }
    }

    fn file(
        &mut self,
        here: &Here,
        name: &CString,
        entry: &Entry,
        archive: &mut Archive<impl Read>,
        path: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::openat(here.own(), name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let file = File::from(file);
        for extent in &entry.extents {
            self.extent(&file, extent.offset, extent.length, archive, path)?;
        }
        // Holes, at the end above all, are made by saying how long the file is.
        fs::ftruncate(&file, entry.size).map_err(failed)?;
        let (uid, gid) = owner(entry);
        let dress = || {
            fs::fchown(&file, Some(uid), Some(gid))?;
            // After the owner, whose change takes set-id bits and capabilities away.
            fs::fchmod(&file, Mode::from_raw_mode(entry.mode))?;
            if let Some(capability) =
                entry.capability.as_ref().filter(|value| is_plain_capability(value))
            {
                fs::fsetxattr(&file, c"security.capability", capability, XattrFlags::empty())?;
            }
            fs::futimens(&file, &times(entry))
        };
        dress().map_err(failed)
    }

    fn extent(
        &mut self,
        file: &File,
        mut offset: u64,
        length: u64,
        archive: &mut Archive<impl Read>,
        path: &Path,
    ) -> Result<(), UnpackError> {
        let end = offset + length;
        while offset < end {
            let wanted = usize::try_from(end - offset).unwrap_or(usize::MAX).min(self.buffer.len());
            let read = archive.read(&mut self.buffer[..wanted])?;
            if read == 0 {
                return Err(ArchiveError::Truncated.into());
            }
            self.count(read as u64)?;
            let bytes = &self.buffer[..read];
            // Whole buffers of zeros become holes, as they were where the archive was made.
            if read < self.buffer.len() || bytes.iter().any(|byte| *byte != 0) {
                file.write_all_at(bytes, offset).map_err(|e| file_error(path, e))?;
            }
            offset += read as u64;
        }
        Ok(())
    }

    fn count(&mut self, bytes: u64) -> Result<(), UnpackError> {
        self.done.bytes += bytes;
        self.passed(self.done.bytes)
    }

    // Also for what is passed over: it takes time, if not space.
    fn passed(&self, bytes: u64) -> Result<(), UnpackError> {
        // An entry's header and padding take up to 2 KiB besides its content.
        let headers = self.done.entries.saturating_mul(2048);
        match bytes > self.limits.bytes.saturating_add(headers) {
            true => Err(UnpackError::Limit { limit: self.limits.bytes, unit: "bytes" }),
            false => Ok(()),
        }
    }

    // Whatever an earlier entry put there goes; a folder to the trash, in one step.
    fn clear(&mut self, here: &Here, name: &CString) -> Result<(), Errno> {
        let stat = match tree::stat(here.own(), name) {
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        self.places.forget();
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            fs::renameat(here.own(), name, &self.trash, disk::random_name())
        } else {
            fs::unlinkat(here.own(), name, AtFlags::empty())
        }
    }

    fn finish(&mut self) {
        for (path, times) in self.late.drain(..).rev() {
            // A later entry may have put something else there; then there is nothing to do.
            if let Ok(folder) = tree::open_folder(self.places.root(), &path) {
                let _ = fs::futimens(&folder, &times);
            }
        }
    }

    // A checksum comes after the last byte, and whoever sums up the source wants all of it.
    fn drain(mut self, archive: Archive<impl Read>) -> Result<Unpacked, UnpackError> {
        let (mut source, mut passed) = archive.into_rest();
        loop {
            match read_some(&mut source, &mut self.buffer).map_err(ArchiveError::Read)? {
                0 => return Ok(self.done),
                length => passed += length as u64,
            }
            self.passed(passed)?;
        }
    }
}

// Under its old name in a scratch folder first: the copier keeps names.
fn copy_one(
    from: BorrowedFd<'_>,
    old: &CString,
    stat: &fs::Stat,
    here: &Here,
    new: &CString,
) -> io::Result<()> {
    let scratch = disk::random_name();
    fs::mkdirat(here.own(), &*scratch, Mode::RWXU)?;
    let inner = tree::open_folder(here.own(), Path::new(&scratch))?;
    let path = Path::new(OsStr::from_bytes(old.to_bytes()));
    let copied = tree::Copier::new(inner.as_fd(), &mut || Ok(()))
        .copy(from, old, stat, inner.as_fd(), path)
        .map_err(|error| match error {
            EngineError::File { source, .. } => source,
            other => io::Error::other(other),
        })
        .and_then(|()| Ok(fs::renameat(&inner, old, here.own(), new)?));
    let _ = fs::unlinkat(&inner, old, AtFlags::empty());
    fs::unlinkat(here.own(), &*scratch, AtFlags::REMOVEDIR)?;
    copied
}

/// The parts of a path below the root; `None` when it leads out or cannot be a path.
fn parts(path: &[u8]) -> Option<Vec<&[u8]>> {
    if path.len() >= MAX_PATH_BYTES || path.is_empty() || path.contains(&0) {
        return None;
    }
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    parts.iter().all(|part| *part != b"..").then_some(parts)
}

fn shown(path: &[u8]) -> PathBuf {
    tree::shown(Path::new(OsStr::from_bytes(path)))
}

fn owner(entry: &Entry) -> (Uid, Gid) {
    let id = |id: u64| u32::try_from(id).expect("ids were checked to be below 65536");
    (Uid::from_raw(id(entry.uid)), Gid::from_raw(id(entry.gid)))
}

fn times(entry: &Entry) -> Timestamps {
    let (seconds, nanos) = entry.modified;
    let modified = Timespec { tv_sec: seconds, tv_nsec: i64::from(nanos) };
    Timestamps { last_access: modified, last_modification: modified }
}

// Version 2: 20 bytes, for every user namespace alike. Version 3 names a root user by an id of the host.
fn is_plain_capability(value: &[u8]) -> bool {
    value.len() == 20 && value[3] == 2
}
