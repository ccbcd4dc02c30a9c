//! Where things lie on the disk, how records get there whole, and who may touch what at once.
//! Knows nothing of what the records mean.

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
    home::{self, Survives, make_private},
    store::{self, StoreKind},
};

/// The two folders everything of this installation is in.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    home: PathBuf,
    cache: PathBuf,
    store: StoreKind,
}

impl Disk {
    /// Creates what is missing. Everything lies below folders only we may enter, because layers hold
    /// set-uid files of strangers.
    pub(crate) fn open(home: &Path, cache: &Path, store: StoreKind) -> Result<Self, EngineError> {
        let disk = Self { home: home.to_owned(), cache: cache.to_owned(), store };
        let home_folders =
            [disk.layers(), disk.snapshots(), disk.partial(), disk.trash(), disk.sandboxes()];
        let cache_folders = [
            disk.cache_layers(),
            disk.images(),
            disk.steps(),
            disk.pulled(),
            disk.building(),
            disk.cache_trash(),
            disk.homes(),
        ];
        for folder in home_folders.iter().chain(&cache_folders) {
            make_private(folder)?;
        }
        disk.register()?;
        Ok(disk)
    }

    /// The same cache seen from another home.
    pub(crate) fn of_home(&self, home: &Path, store: StoreKind) -> Self {
        Self { home: home.to_owned(), cache: self.cache.clone(), store }
    }

    /// How this home keeps disks.
    pub(crate) fn store(&self) -> StoreKind {
        self.store
    }

    /// Where disks and their records are.
    pub(crate) fn root(&self) -> PathBuf {
        store::root(&self.home, self.store)
    }

    pub(crate) fn cache(&self) -> &Path {
        &self.cache
    }

    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.root().join("layers")
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root().join("snapshots")
    }

    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.root().join("sandboxes")
    }

    /// Layers being written. What is here while nobody holds a [`Hold`] is left from a crash.
    pub(crate) fn partial(&self) -> PathBuf {
        self.root().join("partial")
    }

    pub(crate) fn trash(&self) -> PathBuf {
        self.root().join("trash")
    }

    /// Trash on the host's own disk; the same where that is where disks are.
    pub(crate) fn host_trash(&self) -> PathBuf {
        self.home.join("trash")
    }

    pub(crate) fn cache_layers(&self) -> PathBuf {
        self.cache.join("layers")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.cache.join("images")
    }

    /// Which layer stands for a step whose layer was built again by force.
    pub(crate) fn steps(&self) -> PathBuf {
        self.cache.join("steps")
    }

    /// What layers were measured to take: they never change.
    pub(crate) fn sizes(&self) -> PathBuf {
        self.cache.join("sizes")
    }

    /// What a reference to a registry stood for when it was pulled for a recipe.
    pub(crate) fn pulled(&self) -> PathBuf {
        self.cache.join("pulled")
    }

    pub(crate) fn building(&self) -> PathBuf {
        self.cache.join("building")
    }

    pub(crate) fn cache_trash(&self) -> PathBuf {
        self.cache.join("trash")
    }

    /// One record per home that uses this cache: their snapshots stand on its layers.
    pub(crate) fn homes(&self) -> PathBuf {
        self.cache.join("homes")
    }

    fn register(&self) -> Result<(), EngineError> {
        let home = fs::canonicalize(&self.home).map_err(|e| disk_error("find", &self.home, e))?;
        let name =
            hex(digest::digest(&digest::SHA256, home.as_os_str().as_encoded_bytes()).as_ref());
        let record = self.homes().join(format!("{name}.json"));
        if record.exists() { Ok(()) } else { write_record(&record, &home) }
    }

    /// Writes a record of this home's disks, on the last of a full store if need be.
    pub(crate) fn record_write(
        &self,
        path: &Path,
        record: &impl Serialize,
    ) -> Result<(), EngineError> {
        loop {
            match write_record(path, record) {
                Err(EngineError::File { source, .. })
                    if source.kind() == ErrorKind::StorageFull
                        && store::give_way(&self.home, self.store) => {}
                result => return result,
            }
        }
    }

    /// Held by whoever reads which layers there are and then refers to them: until it is dropped
    /// nothing is collected. Many may hold it at once.
    pub(crate) fn hold(&self) -> Result<Hold, EngineError> {
        Ok(Hold {
            _home: lock(&self.home.join("collect.lock"), FlockOperation::LockShared)?,
            _cache: self.hold_cache()?,
        })
    }

    /// The same for the cache alone.
    pub(crate) fn hold_cache(&self) -> Result<File, EngineError> {
        lock(&self.cache.join("collect.lock"), FlockOperation::LockShared)
    }

    /// Waits until nobody holds this home, then keeps everyone out.
    pub(crate) fn hold_home_alone(&self) -> Result<File, EngineError> {
        lock(&self.home.join("collect.lock"), FlockOperation::LockExclusive)
    }

    /// `None` while somebody holds the cache: a build does so for minutes, too long to wait for.
    pub(crate) fn try_hold_cache_alone(&self) -> Result<Option<File>, EngineError> {
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
        let disk =
            Self::open(&folder.path().join("home"), &folder.path().join("cache"), StoreKind::Dir)
                .unwrap();
        tests::Temporary { disk, _folder: folder }
    }
}

/// See [`Disk::hold`].
#[derive(Debug)]
pub(crate) struct Hold {
    _home: File,
    _cache: File,
}

/// Opens a lock file and locks it; dropping the file unlocks it, as does kill -9.
pub(crate) fn lock(path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| disk_error("open the lock", path, e))?;
    locked(file, path, operation)
}

/// Locks a folder itself, which takes no room on a full disk.
pub(crate) fn lock_folder(path: &Path) -> Result<File, EngineError> {
    let folder = File::open(path).map_err(|e| disk_error("open", path, e))?;
    locked(folder, path, FlockOperation::LockExclusive)
}

/// The same; `None` when somebody has it.
pub(crate) fn try_lock_folder(path: &Path) -> Result<Option<File>, EngineError> {
    let folder = File::open(path).map_err(|e| disk_error("open", path, e))?;
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(disk_error("lock", path, error)),
    }
}

fn locked(file: File, path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    loop {
        match rustix::fs::flock(&file, operation) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(disk_error("lock", path, error)),
        }
    }
}

/// An error about a path.
pub(crate) fn disk_error(
    doing: &'static str,
    path: impl Into<PathBuf>,
    source: impl Into<std::io::Error>,
) -> EngineError {
    EngineError::File { doing, path: path.into(), source: source.into() }
}

/// Writes a record so that a crash leaves the old one or the new one, and a power cut too.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> Result<(), EngineError> {
    home::write_record(path, record, Survives::PowerCut)
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

/// The names in a folder of ours, sorted; none when the folder is not there.
pub(crate) fn names_in(folder: &Path) -> Result<Vec<String>, EngineError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(disk_error("list", folder, error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| disk_error("list", folder, e))?;
        // We give only plain names; whatever else lies here is not ours to touch.
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Removes a file; it is fine when it is gone already.
pub(crate) fn remove_file(path: &Path) -> Result<(), EngineError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(disk_error("remove", path, error)),
        _ => Ok(()),
    }
}

/// A name nobody has used yet.
pub(crate) fn random_name() -> String {
    let mut bytes = [0; 16];
    SystemRandom::new()
        .fill(&mut bytes)
        .expect("the kernel's random source is there on every Linux we support");
    hex(&bytes)
}

/// Bytes as hexadecimal text.
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
    fn collecting_waits_for_whoever_holds_the_layers() {
        let disk = Disk::temporary();
        let hold = disk.hold().unwrap();
        assert!(disk.try_hold_cache_alone().unwrap().is_none());
        drop(hold);
        assert!(disk.try_hold_cache_alone().unwrap().is_some());
    }
}
