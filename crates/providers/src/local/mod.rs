//! The local provider: sandboxes, snapshots, images and volumes on this machine, run by the engine.
//! Calls the synchronous engine on blocking threads and translates its results; contains no policy.

mod connect;
mod doctor;
mod errors;
mod freeze;
mod host;
mod images;
mod sandboxes;
mod snapshots;
mod spec;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, LazyLock, OnceLock},
};

use harvest_engine::{Engine, EngineError, Limits};
use harvest_images::DebianMirrors;
use harvest_proto::{SandboxId, launch::NetworkSettings};
use harvest_session::sandboxes::{SandboxError, StandaloneDoors};
use tokio::{
    sync::{Mutex, Semaphore},
    task::spawn_blocking,
};

pub use doctor::program_findings;
pub use host::host_findings;

use errors::sandbox_error;

// Each start holds a thread. The zygote starts sandboxes one at a time; a few more prepare
// meanwhile.
const CONCURRENT_STARTS: usize = 8;

/// The built-in image recipes.
#[derive(Clone)]
pub struct Recipes {
    pub names: Vec<String>,
    /// Writes all recipes into one folder, as they refer to each other, and returns its path.
    pub write_all: Arc<dyn Fn() -> io::Result<PathBuf> + Send + Sync>,
}

/// Sandboxes on this machine.
#[derive(Clone)]
pub struct Local {
    engine: Engine,
    recipes: Recipes,
    /// The limits of a sandbox whose creator gives none.
    default_limits: Limits,
    starts: Arc<Semaphore>,
    counting: Arc<Mutex<()>>,
    state_bytes: u64,
    /// Certificates and package sources of sandboxes with a network; read at the first one.
    settings: Arc<LazyLock<NetworkSettings, ReadSettings>>,
    /// Mirrors of Debian for sandboxes with a network, and the folder of their lists.
    mirrors: Option<Arc<(LazyLock<DebianMirrors>, PathBuf)>>,
    /// Opens the doors of build steps.
    opener: Arc<OnceLock<Arc<dyn StandaloneDoors>>>,
}

/// The certificates and package sources of this host.
#[must_use]
pub fn host_settings() -> NetworkSettings {
    let (settings, left_out) = harvest_images::host_settings();
    if left_out > 0 {
        tracing::warn!(left_out, "this host adds more certificates than sandboxes can be given");
    }
    settings
}

/// The addresses of this host's mirrors of Debian.
#[must_use]
pub fn debian_mirrors() -> Vec<String> {
    DebianMirrors::of_host().addresses()
}

/// Reads the network settings of sandboxes.
pub type ReadSettings = Box<dyn FnOnce() -> NetworkSettings + Send>;

impl Local {
    #[must_use]
    pub fn new(engine: Engine, recipes: Recipes) -> Self {
        Self {
            engine,
            recipes,
            default_limits: Limits::default(),
            starts: Arc::new(Semaphore::new(CONCURRENT_STARTS)),
            counting: Arc::default(),
            state_bytes: harvest_engine::DEFAULT_BYTES,
            settings: Arc::new(LazyLock::new(Box::new(NetworkSettings::default))),
            mirrors: None,
            opener: Arc::default(),
        }
    }

    /// The certificates and package sources of sandboxes with a network. Blocks the first one.
    #[must_use]
    pub fn with_settings(self, read: ReadSettings) -> Self {
        Self { settings: Arc::new(LazyLock::new(read)), ..self }
    }

    /// Tells sandboxes with a network the host's mirrors of Debian, by lists in this folder.
    #[must_use]
    pub fn with_debian_mirrors(self, folder: PathBuf) -> Self {
        Self { mirrors: Some(Arc::new((LazyLock::new(DebianMirrors::of_host), folder))), ..self }
    }

    /// The limits of a sandbox whose creator gives none.
    #[must_use]
    pub fn with_default_limits(self, default_limits: Limits) -> Self {
        Self { default_limits, ..self }
    }

    /// Sets the maximum size of new `/mnt/state` volumes.
    #[must_use]
    pub fn with_state_bytes(self, state_bytes: u64) -> Self {
        Self { state_bytes, ..self }
    }

    /// Runs `work` on a blocking thread.
    async fn work<T: Send + 'static>(
        &self,
        doing: impl Into<String>,
        work: impl FnOnce(&Engine) -> Result<T, SandboxError> + Send + 'static,
    ) -> Result<T, SandboxError> {
        let engine = self.engine.clone();
        let done = spawn_blocking(move || work(&engine)).await;
        done.unwrap_or_else(|panicked| Err(SandboxError::failed(doing, panicked)))
    }

    /// Makes one engine call about a sandbox: `doing` it fails as "cannot … sbx_…".
    async fn on<T: Send + 'static>(
        &self,
        sandbox: &SandboxId,
        doing: &str,
        call: impl FnOnce(&Engine, &SandboxId) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, SandboxError> {
        let id = sandbox.clone();
        self.engine(format!("cannot {doing} {sandbox}"), move |engine| call(engine, &id)).await
    }

    /// Makes one engine call on a blocking thread.
    async fn engine<T: Send + 'static>(
        &self,
        doing: impl Into<String>,
        call: impl FnOnce(&Engine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, SandboxError> {
        let doing = doing.into();
        let same = doing.clone();
        self.work(doing, move |engine| call(engine).map_err(|error| sandbox_error(same, error)))
            .await
    }
}
