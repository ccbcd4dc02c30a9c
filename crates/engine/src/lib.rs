//! The local machine: layers, images, snapshots, isolated process trees, the zygote.
//!
//! Synchronous, and the only crate with unsafe code: every kernel call that Rust cannot vouch for is
//! here, each with the reason why it is sound. The engine's own process never forks and needs no
//! runtime; the zygote, a process of its own, is the parent of every sandbox.
#![expect(unsafe_code, reason = "clone3, mount and seccomp have no safe wrappers")]

/// The zygote is the parent of every sandbox and its log is in the home: on a full disk the standard macro of
/// this name would panic, and take it down for a line nobody can read.
macro_rules! eprintln {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

mod archive;
mod bootstrap;
mod btrfs;
mod build;
mod cgroup;
mod changes;
mod collect;
mod disk;
mod ending;
mod error;
mod facts;
pub mod guest;
mod home;
mod image;
mod import;
mod inspect;
mod isolate;
mod keep;
mod later;
mod layer;
mod loop_device;
mod oci;
mod plan;
pub mod probe;
mod recipe;
mod room;
pub mod rootless;
mod sandbox;
mod seeds;
mod snapshot;
mod spec;
mod store;
mod syscall;
mod trash;
mod tree;
mod unpack;
mod usage;
mod volume;
mod weigh;
mod writable;
pub mod zygote;

use std::sync::Arc;

pub use archive::ArchiveError;
pub use build::{BuildOptions, Progress};
pub use cgroup::{Group, Hierarchy, Setting};
pub use changes::{Before, Change, Changes, How};
pub use collect::Collected;
pub use ending::{ASK_AGAIN, Ending};
pub use error::EngineError;
pub use facts::Lack;
pub use home::Config;
pub use image::{Image, ImageUsers};
pub use import::Import;
pub use inspect::Inspected;
pub use isolate::caps::Capability;
pub use oci::{PullError, PullOptions};
pub use plan::{Handed, HostFacts, IDS, Ids, Namespace, Plan, Redirect, Step};
pub use probe::{Finding, Level};
pub use recipe::{Base, Make, Recipe, RecipeError};
pub use room::{Threshold, Thresholds};
pub use sandbox::{Running, SandboxState, Stopped};
pub use seeds::SeedCounts;
pub use snapshot::{Captured, Snapshot};
pub use spec::{
    Bind, ImageConfig, LayerId, Limits, Network, Origin, Owner, ParseLayerIdError, Spec,
    VolumeMount,
};
pub use store::{Driver, ParseDriverError, StoreKind};
pub use unpack::{UnpackError, UnpackLimits};
pub use usage::{DiskRoom, SandboxUsed, StoreFile, Usage, Used, Weighed};
pub use volume::{
    Backing, Volume, VolumeName, VolumeSpec,
    state::{EXEC_STATE, STATE_FOLDERS, STATE_INSIDE},
};

use disk::Disk;
use error::AtPath;
use home::Home;
use store::Store;

/// The local machine of one home.
#[derive(Debug, Clone)]
pub struct Engine {
    config: Arc<Config>,
    home: Home,
    disk: Disk,
    store: Arc<Store>,
    syncs: later::Later,
}

impl Engine {
    /// Makes the folders that are missing. Starts nothing.
    ///
    /// # Errors
    /// When a folder cannot be made, or belongs to the other kind of user (root or not).
    pub fn open(mut config: Config) -> Result<Self, EngineError> {
        rootless::check()?;
        home::make_private(&config.home)?;
        home::make_private(&config.cache)?;
        // The zygote and every client must call the home by one name: its cgroup is named after it.
        config.home = config.home.canonicalize().at("find", &config.home)?;
        config.cache = config.cache.canonicalize().at("find", &config.cache)?;
        for (folder, variable) in [(&config.home, "HARVEST_HOME"), (&config.cache, "HARVEST_CACHE")]
        {
            rootless::check_store(folder, variable).at("use", folder)?;
        }
        let store = Store::open(&config.home, config.driver)?;
        let home = Home::new(config.home.clone(), store.kind());
        home.make()?;
        for folder in ["layers", "images", "building", "trash"] {
            home::make_private(&config.cache.join(folder))?;
        }
        let disk = Disk::open(&config.home, &config.cache, store.kind())?;
        Ok(Self { config: Arc::new(config), home, disk, store, syncs: later::Later::default() })
    }

    /// The layers, bottom first, and the config a disk begins as.
    fn resolve(&self, from: &Origin) -> Result<(Vec<LayerId>, ImageConfig), EngineError> {
        match from {
            Origin::Layers { layers, config } => Ok((layers.clone(), config.clone())),
            Origin::Image(image) => {
                let found = self.disk.image(image)?;
                let found =
                    found.ok_or_else(|| EngineError::ImageMissing { image: image.clone() })?;
                Ok((found.layers, found.config))
            }
            Origin::Snapshot(snapshot) => {
                let found = self.disk.snapshot(snapshot)?;
                let found = found
                    .ok_or_else(|| EngineError::SnapshotMissing { snapshot: snapshot.clone() })?;
                Ok((found.layers, found.config))
            }
        }
    }
}
