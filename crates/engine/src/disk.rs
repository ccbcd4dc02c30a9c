//! The paths below home and cache, and the locks that keep garbage collection out.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use ring::digest;
use rustix::fs::FlockOperation;
use serde::Serialize;

use crate::{
    EngineError,
    error::AtPath,
    file_lock::{lock, try_lock},
    home::{Home, folders},
    records::{create_private_dir, hex, write_record},
    store,
};

/// Whether the home of a record was removed. If its disk is only not attached, its parent is
/// missing and the nearest existing folder is on another device.
pub(crate) fn is_removed(record: &Path, home: &Path) -> bool {
    let device =
        record.file_stem().and_then(|name| name.to_str()?.rsplit_once('-')?.1.parse::<u64>().ok());
    let nearest = || home.ancestors().skip(1).find_map(|folder| fs::metadata(folder).ok());
    let same_device = || nearest().is_some_and(|folder| Some(folder.dev()) == device);
    !home.is_dir() && (home.parent().is_some_and(Path::is_dir) || same_device())
}

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

    folders! {
        cache_layers = cache / "layers";
        images = cache / "images";
        /// For build steps that were rebuilt by force: the layer that replaces the usual one.
        steps = cache / "steps";
        /// Measured sizes of layers, which never change.
        sizes = cache / "sizes";
        /// Records of registry references that recipes pulled, with the layers they resolved to.
        pulled = cache / "pulled";
        building = cache / "building";
        cache_trash = cache / "trash";
        /// One record per home that uses this cache: snapshots of all homes refer to its layers.
        homes = cache / "homes";
    }

    fn register(&self) -> Result<(), EngineError> {
        let home = fs::canonicalize(self.home.path()).at("find", self.home.path())?;
        let name =
            hex(digest::digest(&digest::SHA256, home.as_os_str().as_encoded_bytes()).as_ref());
        // The device tells a removed home from one whose disk is not attached.
        let device = fs::metadata(&home).at("find", &home)?.dev();
        let record = self.homes().join(format!("{name}-{device}.json"));
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
        try_lock(&self.cache.join("collect.lock"))
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

    #[test]
    fn home_removed_with_its_parent_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let parent = folder.path().join("parent");
        let home = parent.join("home");
        fs::create_dir_all(&home).unwrap();
        let record = format!("hash-{}.json", fs::metadata(&home).unwrap().dev());
        assert!(!is_removed(Path::new(&record), &home));
        fs::remove_dir_all(&parent).unwrap();
        assert!(is_removed(Path::new(&record), &home));
        // On another device: the disk may be detached.
        assert!(!is_removed(Path::new("hash-1.json"), &home));
    }
}
