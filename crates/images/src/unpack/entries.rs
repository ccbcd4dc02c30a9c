//! Writes the entries of an archive into the layer, in order.

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

use harvest_engine::{EngineError, random_name, tree};
use rustix::{
    fs::{self, AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};

use super::{
    ArchiveForm, UnpackError, UnpackLimits, Unpacked, file_error,
    paths::{LayerFolder, PathResolver, open_folder},
};
use crate::{
    archive::{Archive, ArchiveError, Entry, EntryKind, read_some},
    tree_archive,
};

// Markers of OCI layers: a removed file, a folder that hides the layers below, and reserved names.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";
const RESERVED: &[u8] = b".wh..wh.";

// PATH_MAX, with the terminating zero.
const MAX_PATH_BYTES: usize = 4096;

// Folders get their times last, because writing into a folder changes them. Beyond this limit they
// get them at once, which bounds the memory that an archive of many folders costs.
const MAX_DEFERRED_BYTES: usize = 64 << 20;

// The highest id of a sandbox.
const MAX_ID: u64 = 65_535;

// The highest id of a file; one more means "unchanged" to `chown`.
const MAX_TREE_ID: u64 = u32::MAX as u64 - 1;

/// Unpacks one archive into one layer.
pub(super) struct Unpacker {
    resolver: PathResolver,
    trash: OwnedFd,
    form: ArchiveForm,
    limits: UnpackLimits,
    totals: Unpacked,
    /// Folders and the times they get at the end.
    deferred_times: Vec<(PathBuf, Timestamps)>,
    /// Memory that `deferred_times` takes.
    deferred_bytes: usize,
    buffer: Vec<u8>,
}

impl Unpacker {
    /// `root` is the layer's empty root, `below` the roots of the layers below it, top first.
    pub(super) fn new(
        root: OwnedFd,
        below: Vec<OwnedFd>,
        trash: OwnedFd,
        form: ArchiveForm,
        limits: UnpackLimits,
    ) -> Self {
        Self {
            resolver: PathResolver::new(root, below),
            trash,
            form,
            limits,
            totals: Unpacked::default(),
            deferred_times: Vec::new(),
            deferred_bytes: 0,
            buffer: vec![0; 1 << 16],
        }
    }

    /// Unpacks all entries and reads the source to its end.
    pub(super) fn unpack_all(mut self, source: impl Read) -> Result<Unpacked, UnpackError> {
        let mut archive = Archive::new(source);
        while let Some(entry) = archive.next()? {
            self.entry(&entry, &mut archive)?;
            self.check_bytes(archive.position())?;
        }
        self.set_folder_times();
        self.drain(archive)
    }

    fn entry(
        &mut self,
        entry: &Entry,
        archive: &mut Archive<impl Read>,
    ) -> Result<(), UnpackError> {
        self.totals.entries += 1;
        if self.totals.entries > self.limits.entries {
            return Err(UnpackError::Limit { limit: self.limits.entries, unit: "entries" });
        }
        let path = shown(&entry.path);
        let parts = parts(&entry.path).ok_or_else(|| UnpackError::Path { path: path.clone() })?;
        // Owner and mode of the root are fixed; an entry for it is ignored.
        let Some((name, folders)) = parts.split_last() else { return Ok(()) };
        let max = if self.form == ArchiveForm::Trees { MAX_TREE_ID } else { MAX_ID };
        for id in [entry.uid, entry.gid] {
            if id > max {
                return Err(UnpackError::Owner { path, id });
            }
        }
        if entry.kind == EntryKind::Device && self.form != ArchiveForm::Trees {
            if folders.first().is_some_and(|first| *first == b"dev") {
                self.totals.devices += 1;
                return Ok(());
            }
            return Err(UnpackError::Device { path });
        }
        let parent = self.resolver.resolve(folders).map_err(|e| file_error(&path, e))?;
        let made = if self.form == ArchiveForm::Layer && name.starts_with(WHITEOUT) {
            self.apply_marker(&parent, name, &path)
        } else {
            self.create(&parent, name, entry, archive, &path)
        };
        self.resolver.keep_open(parent);
        made
    }

    fn apply_marker(
        &mut self,
        parent: &LayerFolder,
        name: &[u8],
        path: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        if name == OPAQUE_MARKER {
            self.resolver.close_last();
            return tree::make_opaque(parent.fd()).map_err(failed);
        }
        // Metadata of aufs, which has no meaning here.
        if name.starts_with(RESERVED) {
            return Ok(());
        }
        let removed = &name[WHITEOUT.len()..];
        let (false, Ok(removed)) = (matches!(removed, b"" | b"." | b".."), CString::new(removed))
        else {
            return Err(UnpackError::Path { path: path.to_owned() });
        };
        self.resolver.close_last();
        // A marker hides only the layers below; this layer's own entry of that name stays.
        match tree::stat(parent.fd(), &removed) {
            Err(Errno::NOENT) => tree::make_whiteout(parent.fd(), &removed).map_err(failed),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                let folder = open_folder(parent.fd(), &removed);
                folder.and_then(|folder| tree::make_opaque(folder.as_fd())).map_err(failed)
            }
            Ok(_) => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }

    fn create(
        &mut self,
        parent: &LayerFolder,
        name: &[u8],
        entry: &Entry,
        archive: &mut Archive<impl Read>,
        path: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        let name = CString::new(name).map_err(|_| UnpackError::Path { path: path.to_owned() })?;
        if entry.kind == EntryKind::Folder {
            return self.folder(parent, &name, entry).map_err(failed);
        }
        if entry.kind == EntryKind::HardLink {
            return self.hard_link(parent, &name, entry, path);
        }
        self.remove_existing(parent, &name).map_err(failed)?;
        let mode = Mode::from_raw_mode(entry.mode);
        match entry.kind {
            EntryKind::File => return self.file(parent, &name, entry, archive, path),
            EntryKind::Symlink => {
                fs::symlinkat(entry.link.as_slice(), parent.fd(), &name).map_err(failed)?
            }
            EntryKind::Fifo => {
                fs::mknodat(parent.fd(), &name, FileType::Fifo, mode, 0).map_err(failed)?;
            }
            // The only device in a tree is a whiteout; any other becomes one.
            EntryKind::Device => return tree::make_whiteout(parent.fd(), &name).map_err(failed),
            EntryKind::Folder | EntryKind::HardLink => {}
        }
        let (uid, gid) = owner(entry);
        let set_metadata = || {
            fs::chownat(parent.fd(), &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            if entry.kind == EntryKind::Fifo {
                // A FIFO created above, not a symlink: chmod by name cannot follow it elsewhere.
                fs::chmodat(parent.fd(), &name, mode, AtFlags::empty())?;
            }
            fs::utimensat(parent.fd(), &name, &times(entry), AtFlags::SYMLINK_NOFOLLOW)
        };
        set_metadata().map_err(failed)
    }

    fn folder(&mut self, parent: &LayerFolder, name: &CString, entry: &Entry) -> Result<(), Errno> {
        let folder = parent.create_folder(name, &mut || self.remove_existing(parent, name))?;
        let (uid, gid) = owner(entry);
        fs::fchown(&folder, Some(uid), Some(gid))?;
        fs::fchmod(&folder, Mode::from_raw_mode(entry.mode))?;
        self.set_attributes(folder.as_fd(), entry)?;
        let path = parent.path(name);
        if self.deferred_bytes < MAX_DEFERRED_BYTES {
            self.deferred_bytes += path.as_os_str().len() + size_of::<(PathBuf, Timestamps)>();
            self.deferred_times.push((path, times(entry)));
            return Ok(());
        }
        fs::futimens(&folder, &times(entry))
    }

    fn hard_link(
        &mut self,
        parent: &LayerFolder,
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
        let target_parent = self.resolver.resolve(folders).map_err(failed)?;
        if target_parent.path(&last) == parent.path(name) {
            return Ok(());
        }
        let linkable = |stat: &fs::Stat| {
            matches!(
                FileType::from_raw_mode(stat.st_mode),
                FileType::RegularFile | FileType::Symlink
            )
        };
        match tree::stat(target_parent.fd(), &last) {
            Ok(stat) if linkable(&stat) => {
                self.remove_existing(parent, name).map_err(failed)?;
                fs::linkat(target_parent.fd(), &last, parent.fd(), name, AtFlags::empty())
                    .map_err(failed)
            }
            Err(Errno::NOENT) => {
                // The target is in a layer below, which is immutable: copy it into this layer.
                let (folder, stat) = target_parent
                    .below(&last)
                    .filter(|(_, stat)| linkable(stat))
                    .ok_or_else(missing)?;
                self.remove_existing(parent, name).map_err(failed)?;
                self.add_bytes(u64::try_from(stat.st_size).unwrap_or(0))?;
                copy_from_below(folder, &last, &stat, parent, name).map_err(|e| file_error(path, e))
            }
            Ok(_) => Err(missing()),
            Err(error) => Err(failed(error)),
        }
    }

    fn file(
        &mut self,
        parent: &LayerFolder,
        name: &CString,
        entry: &Entry,
        archive: &mut Archive<impl Read>,
        path: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |e: Errno| file_error(path, e);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::openat(parent.fd(), name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let file = File::from(file);
        for extent in &entry.extents {
            self.extent(&file, extent.offset, extent.length, archive, path)?;
        }
        // Sets the size, which creates the hole at the end.
        fs::ftruncate(&file, entry.size).map_err(failed)?;
        let (uid, gid) = owner(entry);
        let set_metadata = || {
            fs::fchown(&file, Some(uid), Some(gid))?;
            // After chown, which clears set-id bits and capabilities.
            fs::fchmod(&file, Mode::from_raw_mode(entry.mode))?;
            if let Some(capability) =
                entry.capability.as_ref().filter(|value| is_portable_capability(value))
            {
                fs::fsetxattr(&file, c"security.capability", capability, XattrFlags::empty())?;
            }
            self.set_attributes(file.as_fd(), entry)?;
            fs::futimens(&file, &times(entry))
        };
        set_metadata().map_err(failed)
    }

    // Attributes beyond capabilities are kept for trees only.
    fn set_attributes(&self, file: BorrowedFd<'_>, entry: &Entry) -> Result<(), Errno> {
        if self.form != ArchiveForm::Trees {
            return Ok(());
        }
        for (name, value) in &entry.attributes {
            if name == tree_archive::OPAQUE {
                tree::make_opaque(file)?;
                continue;
            }
            let Ok(c_name) = CString::new(name.as_slice()) else { continue };
            if !tree_archive::is_kept(name) {
                continue;
            }
            match fs::fsetxattr(file, &c_name, value, XattrFlags::empty()) {
                // This file system has no such attributes.
                Err(Errno::NOTSUP) => {}
                other => other?,
            }
        }
        Ok(())
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
            self.add_bytes(read as u64)?;
            let bytes = &self.buffer[..read];
            // A full buffer of zeros becomes a hole: tar writes out the holes of sparse files.
            if read < self.buffer.len() || bytes.iter().any(|byte| *byte != 0) {
                file.write_all_at(bytes, offset).map_err(|e| file_error(path, e))?;
            }
            offset += read as u64;
        }
        Ok(())
    }

    fn add_bytes(&mut self, bytes: u64) -> Result<(), UnpackError> {
        self.totals.bytes += bytes;
        self.check_bytes(self.totals.bytes)
    }

    // Skipped bytes count too: they take time, if not space.
    fn check_bytes(&self, bytes: u64) -> Result<(), UnpackError> {
        // The headers and padding of an entry take up to 2 KiB.
        let headers = self.totals.entries.saturating_mul(2048);
        match bytes > self.limits.bytes.saturating_add(headers) {
            true => Err(UnpackError::Limit { limit: self.limits.bytes, unit: "bytes" }),
            false => Ok(()),
        }
    }

    // Removes what an earlier entry created there. A folder is moved to the trash, which is atomic.
    fn remove_existing(&mut self, parent: &LayerFolder, name: &CString) -> Result<(), Errno> {
        let stat = match tree::stat(parent.fd(), name) {
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        self.resolver.close_last();
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            fs::renameat(parent.fd(), name, &self.trash, random_name())
        } else {
            fs::unlinkat(parent.fd(), name, AtFlags::empty())
        }
    }

    fn set_folder_times(&mut self) {
        for (path, times) in self.deferred_times.drain(..).rev() {
            // A later entry may have replaced the folder.
            if let Ok(folder) = tree::open_folder(self.resolver.root(), &path) {
                let _ = fs::futimens(&folder, &times);
            }
        }
    }

    // Reads the rest: compression checksums follow the last entry, and digests cover all bytes.
    fn drain(mut self, archive: Archive<impl Read>) -> Result<Unpacked, UnpackError> {
        let (mut source, mut passed) = archive.into_rest();
        loop {
            match read_some(&mut source, &mut self.buffer).map_err(ArchiveError::Read)? {
                0 => return Ok(self.totals),
                length => passed += length as u64,
            }
            self.check_bytes(passed)?;
        }
    }
}

// Copies into a scratch folder and renames from there, because `tree::copy_one` keeps the name.
fn copy_from_below(
    from: BorrowedFd<'_>,
    old: &CString,
    stat: &fs::Stat,
    parent: &LayerFolder,
    new: &CString,
) -> io::Result<()> {
    let scratch = random_name();
    fs::mkdirat(parent.fd(), &*scratch, Mode::RWXU)?;
    let inner = tree::open_folder(parent.fd(), Path::new(&scratch))?;
    let copied = tree::copy_one(from, old, stat, inner.as_fd())
        .map_err(|error| match error {
            EngineError::File { source, .. } => source,
            other => io::Error::other(other),
        })
        .and_then(|()| Ok(fs::renameat(&inner, old, parent.fd(), new)?));
    let _ = fs::unlinkat(&inner, old, AtFlags::empty());
    fs::unlinkat(parent.fd(), &*scratch, AtFlags::REMOVEDIR)?;
    copied
}

/// The components of a path below the root; `None` when it has `..` or cannot be a path.
fn parts(path: &[u8]) -> Option<Vec<&[u8]>> {
    if path.len() >= MAX_PATH_BYTES || path.is_empty() || path.contains(&0) {
        return None;
    }
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    parts.iter().all(|part| *part != b"..").then_some(parts)
}

fn shown(path: &[u8]) -> PathBuf {
    tree::truncate_path(Path::new(OsStr::from_bytes(path)))
}

fn owner(entry: &Entry) -> (Uid, Gid) {
    let id = |id: u64| u32::try_from(id).expect("ids were checked against the highest one");
    (Uid::from_raw(id(entry.uid)), Gid::from_raw(id(entry.gid)))
}

fn times(entry: &Entry) -> Timestamps {
    let (seconds, nanos) = entry.modified;
    let modified = Timespec { tv_sec: seconds, tv_nsec: i64::from(nanos) };
    Timestamps { last_access: modified, last_modification: modified }
}

// Version 2 has 20 bytes and applies to every user namespace. Version 3 contains a uid of the host.
fn is_portable_capability(value: &[u8]) -> bool {
    value.len() == 20 && value[3] == 2
}
