//! How a home stores disks: in plain folders (`dir`) or on btrfs, whose subvolumes make captures
//! and forks take milliseconds. Chosen when the home is created and recorded in `store.json`.
//!
//! ```text
//! dir            <home>/{sandboxes,layers,snapshots,partial,trash}
//! btrfs          <home>/store/…            a folder of the btrfs the home is on
//! btrfs, file    <home>/store/…            mounted from <home>/store.btrfs
//! ```
//!
//! This file chooses, mounts and grows the store; it does not know the content.

mod btrfs_file;

use std::{
    fs::File,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use harvest_proto::api::StoreFile;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::{
    EngineError, btrfs,
    disk_thresholds::free_and_total_bytes,
    error::AtPath,
    file_lock::{lock, try_lock},
    records::{create_private_dir, read_record, write_record},
    rootless,
};

// The version of the store's folder layout.
const VERSION: u32 = 1;

// The free space kept in the store must last for twice this interval at the fastest write rate.
const GROWTH_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// How a new home should store disks. No effect on an existing home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Driver {
    /// On btrfs if this host supports it, else in plain folders.
    Auto,
    /// In plain folders: works on every file system and without root.
    Dir,
    /// On btrfs: directly if the home is on one, else on a btrfs in a file of the home.
    Btrfs,
}

/// A text that is not a storage driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a storage driver: use `auto`, `dir` or `btrfs`")]
pub struct ParseDriverError(String);

impl FromStr for Driver {
    type Err = ParseDriverError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "dir" => Ok(Self::Dir),
            "btrfs" => Ok(Self::Btrfs),
            _ => Err(ParseDriverError(text.to_owned())),
        }
    }
}

/// How a home stores disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    /// In plain folders.
    Dir,
    /// On the btrfs file system of the home.
    Btrfs,
    /// On a btrfs in a file of the home, mounted by a loop device.
    BtrfsFile,
}

impl StoreKind {
    /// Whether disks are btrfs subvolumes.
    pub(crate) fn is_btrfs(self) -> bool {
        self != Self::Dir
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct StoreRecord {
    version: u32,
    driver: StoreKind,
}

/// What the choice of a store depends on.
#[derive(Debug, Clone, Copy)]
struct HostCapabilities {
    root: bool,
    on_btrfs: bool,
    /// Whether `mkfs.btrfs` is installed.
    mkfs: bool,
    /// Free bytes on the home's file system.
    free: u64,
}

/// Chooses the store of a new home; the error says why `wanted` is not possible.
fn choose(wanted: Driver, host: HostCapabilities) -> Result<StoreKind, &'static str> {
    let native = host.root && host.on_btrfs;
    let roomy = host.free >= btrfs_file::MIN_FREE_FOR_AUTO_BYTES;
    match wanted {
        Driver::Dir => Ok(StoreKind::Dir),
        Driver::Auto | Driver::Btrfs if native => Ok(StoreKind::Btrfs),
        Driver::Auto if host.root && host.mkfs && roomy => Ok(StoreKind::BtrfsFile),
        Driver::Auto => Ok(StoreKind::Dir),
        Driver::Btrfs if !host.root => Err("a btrfs store needs root"),
        Driver::Btrfs if !host.mkfs => Err("a btrfs store needs mkfs.btrfs (package btrfs-progs)"),
        Driver::Btrfs if btrfs_file::initial_size(host.free).is_none() => {
            Err("a btrfs store needs 512 MiB of free space")
        }
        Driver::Btrfs => Ok(StoreKind::BtrfsFile),
    }
}

/// The open store of a home.
#[derive(Debug)]
pub(crate) struct Store {
    home: PathBuf,
    kind: StoreKind,
    /// A shared file lock, held while this process uses the store: other processes do not unmount
    /// it.
    in_use_lock: Mutex<Option<File>>,
}

impl Store {
    /// Opens and mounts the store of a home; creates it as `wanted` in a new home.
    pub(crate) fn open(home: &Path, wanted: Driver) -> Result<Arc<Self>, EngineError> {
        let store_lock = lock_store(home)?;
        let kind = read_kind(home)?.map_or_else(|| create(home, wanted), Ok)?;
        let store = Arc::new(Self { home: home.to_owned(), kind, in_use_lock: Mutex::new(None) });
        store.mount_and_grow(&store_lock)?;
        if kind == StoreKind::BtrfsFile {
            store.spawn_growth_thread();
        }
        Ok(store)
    }

    pub(crate) fn kind(&self) -> StoreKind {
        self.kind
    }

    /// Mounts the store if it is not mounted and grows it if free space runs short. Cheap
    /// otherwise.
    pub(crate) fn ensure_mounted(&self) -> Result<(), EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(());
        }
        if self.is_in_use()
            && btrfs_file::is_mounted(&self.home)?
            && !btrfs_file::needs_growth(&self.home)?
        {
            return Ok(());
        }
        self.mount_and_grow(&lock_store(&self.home)?)
    }

    fn mount_and_grow(&self, _store_lock: &File) -> Result<(), EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(());
        }
        btrfs_file::mount(&self.home)?;
        let mut used = self.in_use_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if used.is_none() {
            *used = Some(lock(&self.home.join("store.used"), FlockOperation::LockShared)?);
        }
        // If the store cannot grow, writers inside get ENOSPC; mounting succeeds all the same.
        let _ = btrfs_file::grow(&self.home).and_then(|()| btrfs_file::refill_reserve(&self.home));
        Ok(())
    }

    fn is_in_use(&self) -> bool {
        self.in_use_lock.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Unmounts the store unless another process uses it. The next use mounts it again.
    pub(crate) fn unmount_if_unused(&self) -> Result<(), EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(());
        }
        let _store_lock = lock_store(&self.home)?;
        let mut used = self.in_use_lock.lock().unwrap_or_else(PoisonError::into_inner);
        *used = None;
        let path = self.home.join("store.used");
        if matches!(try_lock(&path), Ok(Some(_))) && btrfs_file::unmount(&self.home)? {
            return Ok(());
        }
        *used = Some(lock(&path, FlockOperation::LockShared)?);
        Ok(())
    }

    // Sandboxes write without asking the engine, so a thread watches the free space. The thread
    // ends when the store is dropped.
    fn spawn_growth_thread(self: &Arc<Self>) {
        let store = Arc::downgrade(self);
        let watch = move || {
            while let Some(store) = store.upgrade() {
                if store.is_in_use() && btrfs_file::is_mounted(&store.home).unwrap_or(false) {
                    // Errors are ignored: the next round tries again.
                    let _ = store.ensure_mounted();
                }
                drop(store);
                thread::sleep(GROWTH_CHECK_INTERVAL);
            }
        };
        let _ = thread::Builder::new().name("store-growth".to_owned()).spawn(watch);
    }

    /// The size of the store's file and the free bytes inside; `None` for other kinds of stores.
    pub(crate) fn file_size(&self) -> Result<Option<StoreFile>, EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(None);
        }
        let file = btrfs_file::path(&self.home);
        let bytes = file.metadata().at("access", &file)?.len();
        Ok(Some(StoreFile { bytes, free_bytes: btrfs_file::free_bytes_inside(&self.home)? }))
    }
}

fn lock_store(home: &Path) -> Result<File, EngineError> {
    lock(&home.join("store.lock"), FlockOperation::LockExclusive)
}

/// The folder of a home's disks.
pub(crate) fn root(home: &Path, kind: StoreKind) -> PathBuf {
    if kind.is_btrfs() { home.join("store") } else { home.to_owned() }
}

/// Frees space for a record in a full store; false when no reserve is left.
pub(crate) fn release_reserve(home: &Path, kind: StoreKind) -> bool {
    kind == StoreKind::BtrfsFile && btrfs_file::release_reserve(home).unwrap_or(false)
}

/// Whether a folder contains a home, rather than being an empty mount point or missing.
pub(crate) fn is_home(home: &Path) -> Result<bool, EngineError> {
    Ok(read_kind(home)?.is_some())
}

/// How a home stores disks, from its record; `None` without a record.
pub(crate) fn read_kind(home: &Path) -> Result<Option<StoreKind>, EngineError> {
    let path = home.join("store.json");
    match read_record::<StoreRecord>(&path)? {
        Some(record) if record.version != VERSION => {
            let reason = format!(
                "{} has format {}, this version of harvest supports format {VERSION}: use the version \
                 that created it",
                path.display(),
                record.version
            );
            Err(EngineError::Invalid(reason))
        }
        found => Ok(found.map(|record| record.driver)),
    }
}

// The record is written last, so that after a crash the store is created again.
fn create(home: &Path, wanted: Driver) -> Result<StoreKind, EngineError> {
    let host = HostCapabilities {
        root: rustix::process::geteuid().is_root() && !rootless::is_active(),
        on_btrfs: btrfs::is_btrfs(home).at("access", home)?,
        mkfs: btrfs_file::find_mkfs().is_some(),
        free: free_and_total_bytes(home)?.0,
    };
    let kind = choose(wanted, host)
        .map_err(|reason| EngineError::Invalid(format!("{reason}: {}", home.display())))?;
    match kind {
        StoreKind::Dir => {}
        StoreKind::Btrfs => create_private_dir(&root(home, kind))?,
        StoreKind::BtrfsFile => btrfs_file::create(home, host.free)?,
    }
    let record = StoreRecord { version: VERSION, driver: kind };
    write_record(&home.join("store.json"), &record)?;
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const CAPABLE: HostCapabilities =
        HostCapabilities { root: true, on_btrfs: false, mkfs: true, free: 100 << 30 };

    #[test]
    fn auto_chooses_btrfs_only_on_capable_hosts() {
        let auto = |host| choose(Driver::Auto, host).unwrap();
        assert_eq!(auto(CAPABLE), StoreKind::BtrfsFile);
        assert_eq!(
            auto(HostCapabilities { on_btrfs: true, mkfs: false, ..CAPABLE }),
            StoreKind::Btrfs
        );
        assert_eq!(auto(HostCapabilities { mkfs: false, ..CAPABLE }), StoreKind::Dir);
        assert_eq!(auto(HostCapabilities { free: 1 << 30, ..CAPABLE }), StoreKind::Dir);
        assert_eq!(
            auto(HostCapabilities { root: false, on_btrfs: true, ..CAPABLE }),
            StoreKind::Dir
        );
        assert_eq!(
            choose(Driver::Dir, HostCapabilities { on_btrfs: true, ..CAPABLE }),
            Ok(StoreKind::Dir)
        );
    }

    #[test]
    fn refusing_btrfs_names_the_missing_capability() {
        let why = |host| choose(Driver::Btrfs, host).unwrap_err();
        assert!(why(HostCapabilities { root: false, ..CAPABLE }).contains("root"));
        assert!(why(HostCapabilities { mkfs: false, ..CAPABLE }).contains("btrfs-progs"));
        assert!(why(HostCapabilities { free: 1 << 20, ..CAPABLE }).contains("free space"));
        assert_eq!(
            choose(Driver::Btrfs, HostCapabilities { free: 1 << 30, ..CAPABLE }),
            Ok(StoreKind::BtrfsFile)
        );
    }

    #[test]
    fn an_existing_home_keeps_its_kind_of_store() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(Store::open(home.path(), Driver::Dir).unwrap().kind(), StoreKind::Dir);
        assert_eq!(Store::open(home.path(), Driver::Btrfs).unwrap().kind(), StoreKind::Dir);
    }

    #[test]
    fn a_store_of_another_format_is_refused() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("store.json"), r#"{"version":2,"driver":"dir"}"#).unwrap();
        let error = Store::open(home.path(), Driver::Dir).unwrap_err().to_string();
        assert!(error.contains("format 2"), "{error}");
    }
}
