//! Archives of whole trees for backups: layers as they are on the disk, with owners, times,
//! attributes, holes, hard links and overlayfs's whiteouts. Packing follows no symlink, unpacking
//! writes nothing outside its folder, whatever the archive holds.
//!
//! Left out: sockets, paths of 4096 bytes and more, and attributes that describe only the original
//! (security labels of the host).

use std::{
    collections::HashMap,
    ffi::{CStr, CString, OsStr},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::Path,
};

use harvest_engine::{EngineError, tree};
use rustix::{
    fs::{self, FileType, Mode, OFlags, SeekFrom, Stat},
    io::Errno,
};

use crate::{
    archive::{Archive, ArchiveError, ArchiveWriter, Entry, EntryKind, Extent, decompressed},
    unpack::{ArchiveForm, Target, UnpackError, UnpackLimits, unpack},
};

/// The attribute of an opaque folder in an archive, whatever its name on this host.
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// The attributes that an archive keeps, by the beginning of their names.
const KEPT: [&[u8]; 2] = [b"user.", b"system.posix_acl_"];

const CAPABILITY: &[u8] = b"security.capability";

// Without root, overlayfs's own attributes begin like this.
const OVERLAY: &[u8] = b"user.overlay.";

// The reader takes up to a megabyte of pax records.
const MAX_ATTRIBUTES_BYTES: usize = 512 << 10;

// PATH_MAX, with the terminating zero.
const MAX_PATH_BYTES: usize = 4096;

// A file up to this size is read at once: it may be replaced or grow while it is read.
const SMALL_FILE_BYTES: u64 = 1 << 20;

/// Why a tree cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// A tree cannot be read.
    #[error(transparent)]
    Tree(#[from] EngineError),
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: std::path::PathBuf, source: io::Error },
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Write(#[source] io::Error),
}

/// Writes trees and files into one archive.
pub struct TreeArchive<W> {
    writer: ArchiveWriter<W>,
    left_out: u64,
}

impl<W: Write> TreeArchive<W> {
    /// Begins an archive in this stream.
    pub fn new(out: W) -> Self {
        Self { writer: ArchiveWriter::new(out), left_out: 0 }
    }

    /// The number of names and attributes that could not be packed.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Adds a file of mode 0600 with this content.
    ///
    /// # Errors
    /// When the archive cannot be written.
    pub fn add_bytes(&mut self, path: &str, content: &[u8]) -> Result<(), PackError> {
        let entry = Entry { mode: 0o600, ..Entry::at(path.as_bytes(), EntryKind::File) };
        self.writer.bytes(&entry, content).map_err(PackError::Write)
    }

    /// Adds one file with its mode and time. Returns false when the file does not exist.
    ///
    /// # Errors
    /// When the file cannot be read or the archive cannot be written.
    pub fn add_file(&mut self, path: &str, file: &Path) -> Result<bool, PackError> {
        let failed = |source| PackError::Read { path: file.to_owned(), source };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = match fs::open(file, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(false),
            other => File::from(other.map_err(|error| failed(error.into()))?),
        };
        let metadata = opened.metadata().map_err(failed)?;
        let mut entry = Entry::at(path.as_bytes(), EntryKind::File);
        entry.mode = metadata.mode() & 0o7777;
        let nanos = u32::try_from(metadata.mtime_nsec()).unwrap_or(0);
        entry.modified = (metadata.mtime(), nanos);
        self.content(entry, &opened, metadata.len()).map_err(|error| error.at(file))?;
        Ok(true)
    }

    /// Adds a folder of mode 0700.
    ///
    /// # Errors
    /// When the archive cannot be written.
    pub fn add_folder(&mut self, path: &str) -> Result<(), PackError> {
        let entry = Entry { mode: 0o700, ..Entry::at(path.as_bytes(), EntryKind::Folder) };
        self.writer.bare(&entry).map_err(PackError::Write)
    }

    /// Adds everything below a folder, and the folder itself, as `path`.
    ///
    /// # Errors
    /// When the tree cannot be read or the archive cannot be written.
    pub fn add_tree(&mut self, path: &str, folder: &Path) -> Result<(), PackError> {
        let failed = |source| PackError::Read { path: folder.to_owned(), source };
        let root = tree::open_root(folder)?;
        let stat = fs::fstat(&root).map_err(|error| failed(error.into()))?;
        let mut entry = entry_of(path.as_bytes().to_vec(), EntryKind::Folder, &stat);
        self.left_out +=
            add_attributes(&mut entry, root.as_fd()).map_err(|error| failed(error.into()))?;
        self.writer.bare(&entry).map_err(PackError::Write)?;
        let mut links = HashMap::new();
        tree::visit(folder, &mut |below, parent, stat| {
            let name = [path.as_bytes(), b"/", below.as_os_str().as_bytes()].concat();
            let last = below.file_name().expect("a visited path has a name").as_bytes();
            let last = CString::new(last).expect("a name from the kernel has no zero byte");
            self.add_entry(name, parent, &last, stat, &mut links)
                .map_err(|error| error.at(&folder.join(tree::truncate_path(below))))
        })
    }

    /// Ends the archive and returns the stream.
    ///
    /// # Errors
    /// When the archive cannot be written.
    pub fn finish(self) -> Result<W, PackError> {
        self.writer.finish().map_err(PackError::Write)
    }

    fn add_entry(
        &mut self,
        path: Vec<u8>,
        parent: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
        links: &mut HashMap<u64, Vec<u8>>,
    ) -> Result<(), PackError> {
        if path.len() >= MAX_PATH_BYTES {
            self.left_out += 1;
            return Ok(());
        }
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                return self.add_regular(path, parent, name, stat, links);
            }
            FileType::Directory => EntryKind::Folder,
            FileType::Symlink => EntryKind::Symlink,
            FileType::Fifo => EntryKind::Fifo,
            FileType::CharacterDevice if tree::is_whiteout(stat) => EntryKind::Device,
            _ => {
                self.left_out += 1;
                return Ok(());
            }
        };
        let mut entry = entry_of(path, kind, stat);
        match kind {
            EntryKind::Symlink => {
                entry.link = fs::readlinkat(parent, name, Vec::new()).map_err(read)?.into_bytes();
            }
            EntryKind::Folder => {
                let name = Path::new(OsStr::from_bytes(name.to_bytes()));
                let folder = tree::open_folder(parent, name).map_err(read)?;
                self.left_out += add_attributes(&mut entry, folder.as_fd()).map_err(read)?;
            }
            _ => {}
        }
        self.writer.bare(&entry).map_err(PackError::Write)
    }

    fn add_regular(
        &mut self,
        path: Vec<u8>,
        parent: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
        links: &mut HashMap<u64, Vec<u8>>,
    ) -> Result<(), PackError> {
        if stat.st_nlink > 1 {
            if let Some(first) = links.get(&stat.st_ino) {
                let entry = entry_of(path, EntryKind::HardLink, stat);
                return self
                    .writer
                    .bare(&Entry { link: first.clone(), ..entry })
                    .map_err(PackError::Write);
            }
            links.insert(stat.st_ino, path.clone());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = fs::openat(parent, name, flags, Mode::empty()).map_err(read)?;
        let mut entry = entry_of(path, EntryKind::File, stat);
        self.left_out += add_attributes(&mut entry, file.as_fd()).map_err(read)?;
        self.content(entry, &File::from(file), u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn content(&mut self, entry: Entry, mut file: &File, size: u64) -> Result<(), PackError> {
        let stored = file.metadata().map_err(no_path)?.blocks() * 512;
        if size <= SMALL_FILE_BYTES && stored >= size {
            let mut content = Vec::new();
            file.read_to_end(&mut content).map_err(no_path)?;
            return self.writer.bytes(&entry, &content).map_err(PackError::Write);
        }
        let extents = extents(file, size).map_err(read)?;
        let entry = Entry { size, extents, ..entry };
        self.writer.stored(&entry, file).map_err(PackError::Write)
    }
}

impl PackError {
    /// The error with the path of what was read.
    fn at(self, file: &Path) -> Self {
        match self {
            Self::Read { source, .. } => Self::Read { path: file.to_owned(), source },
            other => other,
        }
    }
}

fn no_path(source: io::Error) -> PackError {
    PackError::Read { path: std::path::PathBuf::new(), source }
}

fn read(error: Errno) -> PackError {
    no_path(error.into())
}

fn entry_of(path: Vec<u8>, kind: EntryKind, stat: &Stat) -> Entry {
    let mut entry = Entry::at(&path, kind);
    entry.mode = stat.st_mode & 0o7777;
    (entry.uid, entry.gid) = (u64::from(stat.st_uid), u64::from(stat.st_gid));
    entry.modified = (stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0));
    entry
}

/// Adds the attributes to keep. Returns the number of those that are too large for an archive.
fn add_attributes(entry: &mut Entry, file: BorrowedFd<'_>) -> Result<u64, Errno> {
    let (mut left_out, mut total) = (0, 0);
    if entry.kind == EntryKind::Folder && tree::is_opaque(file)? {
        entry.attributes.push((OPAQUE.to_vec(), b"y".to_vec()));
    }
    if matches!(fs::flistxattr_query(file), Ok(0) | Err(Errno::NOTSUP)) {
        return Ok(0);
    }
    // 64 KiB: the kernel's limit for the list of names and for a value.
    let mut list = vec![0; 1 << 16];
    let length = fs::flistxattr(file, &mut list[..])?;
    for name in list[..length].split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        if !is_kept(name.to_bytes()) && name.to_bytes() != CAPABILITY {
            continue;
        }
        let mut value = vec![0; 1 << 16];
        let length = fs::fgetxattr(file, name, &mut value[..])?;
        total += name.to_bytes().len() + length;
        // `=` ends the name in a pax record.
        if total > MAX_ATTRIBUTES_BYTES || name.to_bytes().contains(&b'=') {
            left_out += 1;
            continue;
        }
        entry.attributes.push((name.to_bytes().to_vec(), value[..length].to_vec()));
    }
    Ok(left_out)
}

/// Whether an archive keeps the attribute of this name.
pub(crate) fn is_kept(name: &[u8]) -> bool {
    !name.starts_with(OVERLAY) && KEPT.iter().any(|prefix| name.starts_with(prefix))
}

/// The ranges of a file that are stored.
fn extents(file: &File, size: u64) -> Result<Vec<Extent>, Errno> {
    let mut extents = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // The rest is a hole.
            Err(Errno::NXIO) => break,
            // The file system does not know holes.
            Err(Errno::INVAL) => return Ok(vec![Extent { offset: 0, length: size }]),
            Err(error) => return Err(error),
        };
        let end = fs::seek(file, SeekFrom::Hole(start))?.min(size);
        if start >= end {
            break;
        }
        extents.push(Extent { offset: start, length: end - start });
        at = end;
    }
    Ok(extents)
}

/// Reads a compressed archive to its end, which checks that it is complete and undamaged, and
/// returns the content of its first file, if its path is `first`.
///
/// # Errors
/// When the archive is damaged, truncated or no archive.
pub fn check_archive(source: impl Read, first: &str) -> Result<Option<Vec<u8>>, ArchiveError> {
    // A file at the beginning of a backup is small; the archive may be anything.
    const MAX_BYTES: u64 = 1 << 20;
    let mut archive = Archive::new(decompressed(source)?);
    let mut found = None;
    let mut entry = archive.next()?;
    if let Some(entry) = &entry
        && entry.path == first.as_bytes()
        && entry.size <= MAX_BYTES
    {
        let mut content = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match archive.read(&mut buffer)? {
                0 => break,
                length => content.extend_from_slice(&buffer[..length]),
            }
        }
        found = Some(content);
    }
    while entry.is_some() {
        entry = archive.next()?;
    }
    let (mut rest, _) = archive.into_rest();
    io::copy(&mut rest, &mut io::sink()).map_err(ArchiveError::Read)?;
    Ok(found)
}

/// Unpacks a compressed archive of [`TreeArchive`] into an empty folder. `trash` is another empty
/// folder on the same file system.
///
/// # Errors
/// When the archive is damaged, an entry points outside the folder, or the disk fails.
pub fn unpack_trees(source: impl Read, folder: &Path, trash: &Path) -> Result<(), UnpackError> {
    // Free space is the limit: a backup has no other.
    let limits = UnpackLimits { bytes: u64::MAX / 2, entries: u64::MAX / 4096 };
    let target = Target { layer: folder, below: &[], trash };
    unpack(decompressed(source)?, ArchiveForm::Trees, &target, limits).map(drop)
}

#[cfg(test)]
mod tests;
