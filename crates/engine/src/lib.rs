//! Sandboxes on the local machine: layers, snapshots, isolated process trees, the zygote.
//!
//! Synchronous, and the only crate with unsafe code: every system call without a safe wrapper is
//! here, with a note why it is sound. The engine's own process never forks and needs no async
//! runtime; the zygote, a separate process, is the parent of every sandbox.
#![expect(unsafe_code, reason = "clone3, mount and seccomp have no safe wrappers")]
#![warn(missing_docs)]

/// Replaces the standard macro, which panics when standard error cannot be written: the zygote logs
/// into the home, and a full disk must not kill it.
macro_rules! eprintln {
    ($($arguments:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($arguments)*);
    }};
}

mod backup;
mod btrfs;
mod cgroup;
mod changes;
mod child_probe;
mod coalesce;
mod disk;
mod disk_thresholds;
mod disk_usage;
mod error;
mod facts;
mod fd_passing;
mod file_lock;
mod gc;
mod home;
mod host_tables;
mod image;
mod inspect;
mod isolate;
mod layer;
mod layer_cache;
mod loop_device;
mod plan;
pub mod probe;
mod process;
mod records;
pub mod rootless;
mod sandbox;
mod sandbox_record;
mod snapshot;
mod spec;
mod store;
pub mod supervisor_client;
mod syscall;
mod trash;
pub mod tree;
mod volume;
mod wait;
mod writable;
pub mod zygote;

use std::sync::Arc;

pub use backup::{BackupLayer, DiskBackup};
pub use cgroup::{CgroupView, ComputeUsage, Group, Hierarchy, Setting};
pub use changes::{Baseline, Change, ChangeKind, Changes};
pub use disk_thresholds::{Threshold, Thresholds};
pub use disk_usage::{DiskSpace, DiskUsage, ItemUsage, SandboxUsage, SnapshotUsage, StoreFile};
pub use error::EngineError;
pub use facts::DisabledFeature;
pub use gc::Collected;
pub use home::Config;
pub use host_tables::processes_per_sandbox;
pub use image::{Image, ImageUsers, PulledImage, is_image_name};
pub use inspect::Inspected;
pub use layer_cache::{LayerCache, copy_tree};
pub use plan::{
    Capability, HostFacts, HostSize, IdAllocation, Namespace, PassedDescriptor, Plan, Redirect,
    Step,
};
pub use probe::{Finding, Level};
pub use process::kill_with_parent;
pub use records::random_name;
pub use sandbox_record::{DiskLimitStop, Running, SandboxState};
pub use snapshot::{Captured, Durability, Snapshot};
pub use spec::{
    AGENTS_FILE, Bind, IDS_PER_SANDBOX, ImageConfig, LayerId, Limits, Network, Origin, Owner,
    ParseLayerIdError, ParseVolumeNameError, Spec, VolumeMount, VolumeName,
};
pub use store::{Driver, ParseDriverError, StoreKind};
pub use volume::{
    Backing, DEFAULT_BYTES, Volume, VolumeSpec,
    state::{STATE_FOLDERS, STATE_INSIDE},
};
pub use wait::{EndWait, WAIT_RETRY_DELAY};
pub use zygote::protocol::StandbyCounts;

use disk::Disk;
use error::AtPath;
use home::Home;
use store::Store;

/// Sandboxes, images, snapshots and volumes of one home.
#[derive(Debug, Clone)]
pub struct Engine {
    config: Arc<Config>,
    disk: Disk,
    store: Arc<Store>,
    snapshot_sync: coalesce::Coalesced,
}

impl Engine {
    /// Opens a home, creating missing folders. Starts no process.
    ///
    /// # Errors
    /// When a folder cannot be created, or belongs to the other kind of user (root or not).
    pub fn open(mut config: Config) -> Result<Self, EngineError> {
        rootless::require_root()?;
        records::create_private_dir(&config.home)?;
        records::create_private_dir(&config.cache)?;
        // The zygote and every client must use the same path of the home: its cgroup is named after
        // it.
        config.home = config.home.canonicalize().at("find", &config.home)?;
        config.cache = config.cache.canonicalize().at("find", &config.cache)?;
        for (folder, variable) in [(&config.home, "HARVEST_HOME"), (&config.cache, "HARVEST_CACHE")]
        {
            rootless::check_store_owner(folder, variable).at("use", folder)?;
        }
        let store = Store::open(&config.home, config.driver)?;
        let home = Home::new(config.home.clone(), store.kind());
        let disk = Disk::open(home, &config.cache)?;
        Ok(Self {
            config: Arc::new(config),
            disk,
            store,
            snapshot_sync: coalesce::Coalesced::default(),
        })
    }

    /// The layers, bottom first, and the config of an origin.
    fn resolve(&self, from: &Origin) -> Result<(Vec<LayerId>, ImageConfig), EngineError> {
        match from {
            Origin::Layers { layers, config } => Ok((layers.clone(), config.clone())),
            Origin::Image(image) => {
                let missing = || EngineError::ImageMissing { image: image.clone() };
                let found = self.disk.image(image)?.ok_or_else(missing)?;
                Ok((found.layers, found.config))
            }
            Origin::Snapshot(snapshot) => {
                let missing = || EngineError::SnapshotMissing { snapshot: snapshot.clone() };
                let found = self.disk.snapshot(snapshot)?.ok_or_else(missing)?;
                Ok((found.layers, found.config))
            }
        }
    }
}
