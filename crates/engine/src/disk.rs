//! The paths below home and cache, the locks that guard them, and reading and writing records.
//! Does not know what the records mean.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use ring::{
    digest,
    rand::{SecureRandom, SystemRandom},
};
use rustix::fs::FlockOperation;
use serde::Serialize;

pub(crate) use crate::home::read_record;
use crate::{
    EngineError,
    home::{self, Durability, Home, create_private_dir},
    store,
};

/// The storage of an installation: its home, and the cache that all homes share.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    pub(crate) home: Home,
    cache: PathBuf,
}

impl Disk {
    /// Creates missing folders, with mode 0700: layers contain untrusted set-uid files.
    pub(crate) fn open(home: Home, cache: &Path) -> Result<Self, EngineError> {
        home.create_folders()?;
        let disk = Self { home, cache: cache.to_owned() };
        for folder in [
            disk.cache_layers(),
            disk.images(),
            disk.steps(),
            disk.pulled(),
            disk.building(),
            disk.cache_trash(),
            disk.homes(),
        ] {
            create_private_dir(&folder)?;
        }
        disk.register()?;
        Ok(disk)
    }

    /// The same cache with another home.
    pub(crate) fn with_home(&self, home: Home) -> Self {
        Self { home, cache: self.cache.clone() }
    }

    pub(crate) fn cache(&self) -> &Path {
        &self.cache
    }

    pub(crate) fn cache_layers(&self) -> PathBuf {
        self.cache.join("layers")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.cache.join("images")
    }

    /// For build steps that were rebuilt by force: the layer that replaces the step's usual one.
    pub(crate) fn steps(&self) -> PathBuf {
        self.cache.join("steps")
    }

    /// Measured sizes of layers, which never change.
    pub(crate) fn sizes(&self) -> PathBuf {
        self.cache.join("sizes")
    }

    /// Records of registry references that recipes pulled, with the layers they resolved to.
    pub(crate) fn pulled(&self) -> PathBuf {
        self.cache.join("pulled")
    }

    pub(crate) fn building(&self) -> PathBuf {
        self.cache.join("building")
    }

    pub(crate) fn cache_trash(&self) -> PathBuf {
        self.cache.join("trash")
    }

    /// One record per home that uses this cache, since snapshots of all homes refer to its layers.
    pub(crate) fn homes(&self) -> PathBuf {
        self.cache.join("homes")
    }

    fn register(&self) -> Result<(), EngineError> {
        let home = fs::canonicalize(self.home.path())
            .map_err(|e| disk_error("find", self.home.path(), e))?;
        let name =
            hex(digest::digest(&digest::SHA256, home.as_os_str().as_encoded_bytes()).as_ref());
        let record = self.homes().join(format!("{name}.json"));
        if record.exists() { Ok(()) } else { write_record(&record, &home) }
    }

    /// Writes a record of this home; in a full store, uses the space reserved for records.
    pub(crate) fn record_write(
        &self,
        path: &Path,
        record: &impl Serialize,
    ) -> Result<(), EngineError> {
        loop {
            match write_record(path, record) {
                Err(EngineError::File { source, .. })
                    if source.kind() == ErrorKind::StorageFull
                        && store::release_reserve(self.home.path(), self.home.store()) => {}
                result => return result,
            }
        }
    }

    /// Takes the shared lock that keeps garbage collection out, from reading which layers exist
    /// until a record refers to them. Many may hold it at once.
    pub(crate) fn lock_against_gc(&self) -> Result<GcGuard, EngineError> {
        Ok(GcGuard {
            _home: lock(&self.home.path().join("collect.lock"), FlockOperation::LockShared)?,
            _cache: self.lock_cache_against_gc()?,
        })
    }

    /// [`Disk::lock_against_gc`] for the cache only.
    pub(crate) fn lock_cache_against_gc(&self) -> Result<File, EngineError> {
        lock(&self.cache.join("collect.lock"), FlockOperation::LockShared)
    }

    /// Takes the exclusive lock of this home for garbage collection; waits for all shared holders.
    pub(crate) fn lock_home_for_gc(&self) -> Result<File, EngineError> {
        lock(&self.home.path().join("collect.lock"), FlockOperation::LockExclusive)
    }

    /// Takes the exclusive lock of the cache. Returns `None` while it is held: a build holds it for
    /// minutes.
    pub(crate) fn try_lock_cache_for_gc(&self) -> Result<Option<File>, EngineError> {
        let path = self.cache.join("collect.lock");
        match lock(&path, FlockOperation::NonBlockingLockExclusive) {
            Ok(file) => Ok(Some(file)),
            Err(EngineError::File { source, .. }) if source.kind() == ErrorKind::WouldBlock => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    #[cfg(test)]
    pub(crate) fn temporary() -> tests::Temporary {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("home");
        create_private_dir(&home).unwrap();
        let store = store::Store::open(&home, store::Driver::Dir).unwrap();
        let home = Home::new(home, store.kind());
        let disk = Self::open(home, &folder.path().join("cache")).unwrap();
        tests::Temporary { disk, _folder: folder }
    }
}

/// See [`Disk::lock_against_gc`].
#[derive(Debug)]
pub(crate) struct GcGuard {
    _home: File,
    _cache: File,
}

/// Opens a lock file and locks it. Dropping the file, or the end of the process, unlocks it.
pub(crate) fn lock(path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| disk_error("open the lock", path, e))?;
    flock(file, path, operation)
}

/// Locks a folder itself, which works on a full disk.
pub(crate) fn lock_folder(path: &Path) -> Result<File, EngineError> {
    let folder = File::open(path).map_err(|e| disk_error("open", path, e))?;
    flock(folder, path, FlockOperation::LockExclusive)
}

/// [`lock_folder`] without waiting; `None` when the folder is locked.
pub(crate) fn try_lock_folder(path: &Path) -> Result<Option<File>, EngineError> {
    let folder = File::open(path).map_err(|e| disk_error("open", path, e))?;
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(disk_error("lock", path, error)),
    }
}

fn flock(file: File, path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    loop {
        match rustix::fs::flock(&file, operation) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(disk_error("lock", path, error)),
        }
    }
}

/// An [`EngineError::File`].
pub(crate) fn disk_error(
    doing: &'static str,
    path: impl Into<PathBuf>,
    source: impl Into<std::io::Error>,
) -> EngineError {
    EngineError::File { doing, path: path.into(), source: source.into() }
}

/// Writes a record atomically: after a crash or power cut, the old or the new one exists.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> Result<(), EngineError> {
    home::write_record(path, record, Durability::PowerCut)
}

/// The records of a folder, by name without `.json`.
pub(crate) fn record_names(folder: &Path) -> Result<Vec<String>, EngineError> {
    let mut names = Vec::new();
    for name in names_in(folder)? {
        if let Some(name) = name.strip_suffix(".json") {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// The names in a folder, sorted; empty when the folder does not exist.
pub(crate) fn names_in(folder: &Path) -> Result<Vec<String>, EngineError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(disk_error("list", folder, error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| disk_error("list", folder, e))?;
        // The engine only creates UTF-8 names; others are not its own.
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Removes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<(), EngineError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(disk_error("remove", path, error)),
        _ => Ok(()),
    }
}

/// A random, unused file name.
pub fn random_name() -> String {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes).expect("getrandom exists on every supported kernel");
    hex(&bytes)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) struct Temporary {
        pub(super) disk: Disk,
        pub(super) _folder: tempfile::TempDir,
    }

    impl std::ops::Deref for Temporary {
        type Target = Disk;
        fn deref(&self) -> &Disk {
            &self.disk
        }
    }

    #[test]
    fn gc_waits_for_holders_of_the_lock() {
        let disk = Disk::temporary();
        let guard = disk.lock_against_gc().unwrap();
        assert!(disk.try_lock_cache_for_gc().unwrap().is_none());
        drop(guard);
        assert!(disk.try_lock_cache_for_gc().unwrap().is_some());
    }
}
