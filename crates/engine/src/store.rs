//! Where a home keeps disks: in plain folders (`dir`) or on btrfs, whose subvolumes make captures and
//! forks a matter of milliseconds. Chosen once, when the home is made, and written down in `store.json`;
//! a home without that record keeps them in plain folders.
//!
//! ```text
//! dir            <home>/{sandboxes,layers,snapshots,partial,trash}
//! btrfs          <home>/store/…            a folder of the btrfs the home is on
//! btrfs, file    <home>/store/…            mounted from <home>/store.btrfs
//! ```
//!
//! This file knows where things are and that they are there; what lies in them is others' business.

mod file;

use std::{
    fs::File,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::{
    EngineError, btrfs,
    disk::lock,
    error::AtPath,
    home::{Survives, make_private, read_record, write_record},
    rootless,
};

// The first form of what is below the store's folder.
const VERSION: u32 = 1;

// Half a second of the fastest writer must fit into what is kept free ahead of it.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How a new home is to keep disks. Of no effect on one that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Driver {
    /// On btrfs where this host can, else in plain folders.
    Auto,
    /// In plain folders: anywhere, also without root.
    Dir,
    /// On btrfs: that of the host where the home is on one, else in a file of the home.
    Btrfs,
}

/// Why a text is no driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of `auto`, `dir` and `btrfs`")]
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

/// How a home keeps disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    /// In plain folders.
    Dir,
    /// On the btrfs the home is on.
    Btrfs,
    /// On a btrfs in a file of the home.
    BtrfsFile,
}

impl StoreKind {
    /// Whether disks are subvolumes.
    pub(crate) fn is_btrfs(self) -> bool {
        self != Self::Dir
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    driver: StoreKind,
}

/// What a choice depends on.
#[derive(Debug, Clone, Copy)]
struct Facts {
    root: bool,
    on_btrfs: bool,
    /// Whether there is a `mkfs.btrfs`.
    mkfs: bool,
    /// Bytes free where the home is.
    free: u64,
}

/// How a new home keeps disks, or why it cannot as wanted.
fn choose(wanted: Driver, facts: Facts) -> Result<StoreKind, &'static str> {
    let native = facts.root && facts.on_btrfs;
    let roomy = facts.free >= file::ROOMY_BYTES;
    match wanted {
        Driver::Dir => Ok(StoreKind::Dir),
        Driver::Auto | Driver::Btrfs if native => Ok(StoreKind::Btrfs),
        Driver::Auto if facts.root && facts.mkfs && roomy => Ok(StoreKind::BtrfsFile),
        Driver::Auto => Ok(StoreKind::Dir),
        Driver::Btrfs if !facts.root => Err("a store on btrfs needs root"),
        Driver::Btrfs if !facts.mkfs => {
            Err("a store on btrfs needs mkfs.btrfs (package btrfs-progs)")
        }
        Driver::Btrfs if file::first_size(facts.free).is_none() => {
            Err("a store on btrfs needs 512 MiB of free space")
        }
        Driver::Btrfs => Ok(StoreKind::BtrfsFile),
    }
}

/// The store of one home, in use by this process.
#[derive(Debug)]
pub(crate) struct Store {
    home: PathBuf,
    kind: StoreKind,
    /// Held while this process uses the store: nobody unmounts it under us.
    used: Mutex<Option<File>>,
}

impl Store {
    /// Finds the store of a home, which is made as `wanted` when the home is new, and has it mounted.
    pub(crate) fn open(home: &Path, wanted: Driver) -> Result<Arc<Self>, EngineError> {
        let turn = lock(&home.join("store.lock"), FlockOperation::LockExclusive)?;
        let kind = match kind_of(home)? {
            Some(kind) => kind,
            None if is_made(home)? => StoreKind::Dir,
            None => make(home, wanted)?,
        };
        let store = Arc::new(Self { home: home.to_owned(), kind, used: Mutex::new(None) });
        store.awake(&turn)?;
        if kind == StoreKind::BtrfsFile {
            store.look_after();
        }
        Ok(store)
    }

    /// How it keeps disks.
    pub(crate) fn kind(&self) -> StoreKind {
        self.kind
    }

    /// Has the store mounted, with room ahead of whoever writes. Cheap when all is well.
    pub(crate) fn wake(&self) -> Result<(), EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(());
        }
        if self.is_used() && file::is_mounted(&self.home)? && !file::is_short(&self.home)? {
            return Ok(());
        }
        let turn = lock(&self.home.join("store.lock"), FlockOperation::LockExclusive)?;
        self.awake(&turn)
    }

    fn awake(&self, _turn: &File) -> Result<(), EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(());
        }
        file::mount(&self.home)?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.is_none() {
            *used = Some(lock(&self.home.join("store.used"), FlockOperation::LockShared)?);
        }
        // Without room to grow, whoever writes inside learns of it; that is no reason to fail here.
        let _ = file::grow(&self.home).and_then(|()| file::refill(&self.home));
        Ok(())
    }

    fn is_used(&self) -> bool {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Unmounts the store, unless another process uses it. It is mounted again when it is next needed.
    pub(crate) fn rest(&self) -> Result<(), EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(());
        }
        let _turn = lock(&self.home.join("store.lock"), FlockOperation::LockExclusive)?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = None;
        let path = self.home.join("store.used");
        if lock(&path, FlockOperation::NonBlockingLockExclusive).is_ok()
            && file::unmount(&self.home)?
        {
            return Ok(());
        }
        *used = Some(lock(&path, FlockOperation::LockShared)?);
        Ok(())
    }

    // Whoever writes inside a sandbox asks nobody first: somebody has to see that room runs out. The
    // thread ends with the store.
    fn look_after(self: &Arc<Self>) {
        let store = Arc::downgrade(self);
        let look = move || {
            while let Some(store) = store.upgrade() {
                if store.is_used() && file::is_mounted(&store.home).unwrap_or(false) {
                    // Tried again in a moment.
                    let _ = store.wake();
                }
                drop(store);
                thread::sleep(LOOK_EVERY);
            }
        };
        let _ = thread::Builder::new().name("store-room".to_owned()).spawn(look);
    }

    /// The size of the store's file and how much of it is free; `None` without such a file.
    pub(crate) fn file_size(&self) -> Result<Option<(u64, u64)>, EngineError> {
        if self.kind != StoreKind::BtrfsFile {
            return Ok(None);
        }
        let size = file::path(&self.home).metadata().at("look at", file::path(&self.home))?.len();
        Ok(Some((size, file::free_inside(&self.home)?)))
    }
}

/// Where the disks of a home are.
pub(crate) fn root(home: &Path, kind: StoreKind) -> PathBuf {
    if kind.is_btrfs() { home.join("store") } else { home.to_owned() }
}

/// Makes room for a record in a store that is full; false when there is nothing to make it of.
pub(crate) fn give_way(home: &Path, kind: StoreKind) -> bool {
    kind == StoreKind::BtrfsFile && file::give_way(home).unwrap_or(false)
}

/// Whether a folder is a home, and not where one was or will be.
pub(crate) fn is_made(home: &Path) -> Result<bool, EngineError> {
    Ok(kind_of(home)?.is_some() || home.join("sandboxes").exists())
}

/// How a home keeps disks; `None` when nothing says.
pub(crate) fn kind_of(home: &Path) -> Result<Option<StoreKind>, EngineError> {
    let path = home.join("store.json");
    match read_record::<Record>(&path)? {
        Some(record) if record.version != VERSION => {
            let reason = format!(
                "{} is of format {}, this harvest knows {VERSION}: use the one that made it",
                path.display(),
                record.version
            );
            Err(EngineError::Invalid { reason })
        }
        found => Ok(found.map(|record| record.driver)),
    }
}

// Whatever a crash leaves of this is done again: the record comes last.
fn make(home: &Path, wanted: Driver) -> Result<StoreKind, EngineError> {
    let facts = Facts {
        root: rustix::process::geteuid().is_root() && !rootless::is_here(),
        on_btrfs: btrfs::is_here(home).at("look at", home)?,
        mkfs: file::mkfs().is_some(),
        free: file::free(home)?,
    };
    let kind = choose(wanted, facts).map_err(|reason| EngineError::Invalid {
        reason: format!("{reason}: {}", home.display()),
    })?;
    match kind {
        StoreKind::Dir => {}
        StoreKind::Btrfs => make_private(&root(home, kind))?,
        StoreKind::BtrfsFile => file::make(home, facts.free)?,
    }
    let record = Record { version: VERSION, driver: kind };
    write_record(&home.join("store.json"), &record, Survives::PowerCut)?;
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ABLE: Facts = Facts { root: true, on_btrfs: false, mkfs: true, free: 100 << 30 };

    #[test]
    fn btrfs_is_taken_where_the_host_can_and_never_forced_on_one_that_cannot() {
        let auto = |facts| choose(Driver::Auto, facts).unwrap();
        assert_eq!(auto(ABLE), StoreKind::BtrfsFile);
        assert_eq!(auto(Facts { on_btrfs: true, mkfs: false, ..ABLE }), StoreKind::Btrfs);
        assert_eq!(auto(Facts { mkfs: false, ..ABLE }), StoreKind::Dir);
        assert_eq!(auto(Facts { free: 1 << 30, ..ABLE }), StoreKind::Dir);
        assert_eq!(auto(Facts { root: false, on_btrfs: true, ..ABLE }), StoreKind::Dir);
        assert_eq!(choose(Driver::Dir, Facts { on_btrfs: true, ..ABLE }), Ok(StoreKind::Dir));
    }

    #[test]
    fn asking_for_btrfs_where_it_cannot_be_says_what_is_missing() {
        let why = |facts| choose(Driver::Btrfs, facts).unwrap_err();
        assert!(why(Facts { root: false, ..ABLE }).contains("root"));
        assert!(why(Facts { mkfs: false, ..ABLE }).contains("btrfs-progs"));
        assert!(why(Facts { free: 1 << 20, ..ABLE }).contains("free space"));
        assert_eq!(
            choose(Driver::Btrfs, Facts { free: 1 << 30, ..ABLE }),
            Ok(StoreKind::BtrfsFile)
        );
    }

    #[test]
    fn a_home_that_was_there_before_stays_in_plain_folders() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("sandboxes")).unwrap();
        assert_eq!(Store::open(home.path(), Driver::Btrfs).unwrap().kind(), StoreKind::Dir);
        let fresh = tempfile::tempdir().unwrap();
        assert_eq!(Store::open(fresh.path(), Driver::Dir).unwrap().kind(), StoreKind::Dir);
        assert_eq!(Store::open(fresh.path(), Driver::Btrfs).unwrap().kind(), StoreKind::Dir);
    }

    #[test]
    fn a_store_of_a_later_format_is_not_touched() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("store.json"), r#"{"version":2,"driver":"dir"}"#).unwrap();
        let error = Store::open(home.path(), Driver::Dir).unwrap_err().to_string();
        assert!(error.contains("format 2"), "{error}");
    }
}
