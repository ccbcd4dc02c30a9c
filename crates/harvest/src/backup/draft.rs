//! The files that a backup is written to before it has its name. They are removed when the backup
//! fails, and a kill leaves at most these two.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use flate2::{Compression, write::GzEncoder};
use harvest_images::TreeArchive;
use ring::digest;
use rustix::{
    fs::{CWD, Mode, OFlags, RenameFlags, open, renameat_with},
    io::Errno,
};

use crate::{
    cli::units::bytes,
    printer::{Advice, Printer},
};

/// Appended to the backup's name while it is written.
const PARTIAL: &str = ".partial";

/// Appended to the backup's name for the copy of the database.
const DATABASE: &str = ".partial.db";

/// The files of a backup that is being made; removed unless it is completed. The lock of the
/// partial file keeps another backup of this name out until both names are free again.
pub(super) struct Draft {
    partial: PathBuf,
    /// The file for the copy of the database.
    pub(super) database: PathBuf,
    file: File,
    is_complete: bool,
}

pub(super) type Archive = TreeArchive<Progress>;

impl Draft {
    pub(super) fn create(file: &Path) -> Result<Self> {
        let named = |suffix: &str| {
            let mut name = OsString::from(file);
            name.push(suffix);
            PathBuf::from(name)
        };
        let (partial, database) = (named(PARTIAL), named(DATABASE));
        let file = create_locked(&partial)?;
        let draft = Self { partial, database, file, is_complete: false };
        // Left by a backup that was killed.
        remove_if_exists(&draft.database)?;
        create_private(&draft.database)
            .with_context(|| format!("cannot create {}", draft.database.display()))?;
        Ok(draft)
    }

    pub(super) fn archive(&self, print: Printer) -> Result<Archive> {
        let cloned = self.file.try_clone();
        let file = cloned.with_context(|| format!("cannot open {}", self.partial.display()))?;
        let sha256 = digest::Context::new(&digest::SHA256);
        let output = BufWriter::new(Output { file, sha256, bytes: 0 });
        let gzip = GzEncoder::new(output, Compression::fast());
        Ok(TreeArchive::new(Progress { gzip, bytes: 0, shown: 0, began: Instant::now(), print }))
    }

    /// Gives the complete archive its name. Returns its size and hash.
    pub(super) fn finish(mut self, archive: Archive, file: &Path) -> Result<(u64, String)> {
        let progress = archive.finish()?;
        remove_if_exists(&self.database)?;
        let write = || -> io::Result<Output> {
            let buffered = progress.gzip.finish()?;
            let output = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
            output.file.sync_all()?;
            renameat_with(CWD, &self.partial, CWD, file, RenameFlags::NOREPLACE)?;
            // The next backup of this name may have begun.
            self.is_complete = true;
            File::open(folder_of(file))?.sync_all()?;
            Ok(output)
        };
        let output = write().with_context(|| format!("cannot write {}", file.display()))?;
        let hash = output.sha256.finish();
        let hash = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((output.bytes, hash))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        for path in [&self.database, &self.partial] {
            let _ = fs::remove_file(path);
        }
    }
}

/// Creates a file for one backup alone. One that a killed backup left has no lock and is replaced.
fn create_locked(path: &Path) -> Result<File> {
    let in_use = || {
        let message = format!("another `harvest backup create` writes {}", path.display());
        Advice::new(message, "wait for it, or name another file")
    };
    let failed = || format!("cannot create {}", path.display());
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let left = match open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => None,
        other => Some(File::from(other.map_err(io::Error::from).with_context(failed)?)),
    };
    if let Some(left) = &left {
        if !locks(left, path) {
            bail!(in_use());
        }
        remove_if_exists(path)?;
    }
    match create_private(path) {
        // Another backup may have taken the new file for one that a kill left.
        Ok(file) if locks(&file, path) => Ok(file),
        Ok(_) => bail!(in_use()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => bail!(in_use()),
        Err(error) => Err(error).with_context(failed),
    }
}

/// Locks a file, unless another backup has locked, renamed or replaced it.
fn locks(file: &File, path: &Path) -> bool {
    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let is_locked = file.try_lock().is_ok();
    let (own, named) = (file.metadata().map(id), fs::symlink_metadata(path).map(id));
    is_locked && matches!((own, named), (Ok(own), Ok(named)) if own == named)
}

fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn remove_if_exists(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

pub(super) fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The file, with its size and hash so far.
struct Output {
    file: File,
    sha256: digest::Context,
    bytes: u64,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.sha256.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Shows how much was packed.
pub(super) struct Progress {
    gzip: GzEncoder<BufWriter<Output>>,
    bytes: u64,
    shown: u64,
    began: Instant,
    print: Printer,
}

impl Write for Progress {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        let written = self.gzip.write(content)?;
        self.bytes += written as u64;
        if self.bytes - self.shown > 8_000_000 {
            self.shown = self.bytes;
            self.print.live(&format!("Packed {}", bytes(self.bytes)), Some(self.began.elapsed()));
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.gzip.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abandoned_draft_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b.tar.gz");
        for left in ["b.tar.gz.partial", "b.tar.gz.partial.db"] {
            fs::write(folder.path().join(left), "left by a kill").unwrap();
        }
        let draft = Draft::create(&file).unwrap();
        assert_eq!(fs::metadata(&draft.partial).unwrap().len(), 0);
        drop(draft);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn second_backup_of_a_name_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b.tar.gz");
        let first = Draft::create(&file).unwrap();
        fs::write(&first.database, "of the first").unwrap();
        let refused = Draft::create(&file).err().unwrap().to_string();
        assert!(refused.contains("another `harvest backup create`"), "{refused}");
        assert_eq!(fs::read(&first.database).unwrap(), b"of the first");
        (&first.file).write_all(b"first").unwrap();
        assert_eq!(fs::read(&first.partial).unwrap(), b"first");
        drop(first);
        Draft::create(&file).unwrap();
    }

    #[test]
    fn renamed_backup_is_not_locked_again() {
        let folder = tempfile::tempdir().unwrap();
        let (partial, complete) = (folder.path().join("partial"), folder.path().join("complete"));
        let file = create_private(&partial).unwrap();
        fs::rename(&partial, &complete).unwrap();
        assert!(!locks(&file, &partial));
        create_private(&partial).unwrap();
        assert!(!locks(&file, &partial));
        assert!(locks(&file, &complete));
    }
}
