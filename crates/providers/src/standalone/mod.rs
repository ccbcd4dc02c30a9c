//! Standalone sandboxes, images and volumes on this machine. Calls the engine on blocking threads
//! and translates its results and errors to API types.

mod disks;
mod doctor;
mod errors;
mod images;
mod sandboxes;
mod spec;

use std::{io, path::PathBuf, sync::Arc};

use harvest_engine::{Engine, EngineError};
use harvest_session::standalone::HostError;
use tokio::task::spawn_blocking;

pub use disks::host_findings;
pub use doctor::program_findings;
use errors::host_error;

/// The built-in image recipes.
#[derive(Clone)]
pub struct Recipes {
    pub names: Vec<String>,
    /// Writes all recipes into one folder, as they refer to each other, and returns its path.
    pub write_all: Arc<dyn Fn() -> io::Result<PathBuf> + Send + Sync>,
}

/// The engine of this machine as a [`harvest_session::standalone::SandboxHost`].
#[derive(Clone)]
pub struct LocalSandboxHost {
    engine: Engine,
    recipes: Recipes,
}

impl LocalSandboxHost {
    #[must_use]
    pub const fn new(engine: Engine, recipes: Recipes) -> Self {
        Self { engine, recipes }
    }

    /// Runs `work` on a blocking thread.
    async fn work<T: Send + 'static>(
        &self,
        doing: impl Into<String>,
        work: impl FnOnce(&Engine) -> Result<T, HostError> + Send + 'static,
    ) -> Result<T, HostError> {
        let (engine, doing) = (self.engine.clone(), doing.into());
        let done = spawn_blocking(move || work(&engine)).await;
        done.unwrap_or_else(|panicked| {
            Err(HostError::Failed { doing, hint: None, source: panicked.into() })
        })
    }

    /// Makes one engine call on a blocking thread.
    async fn call_engine<T: Send + 'static>(
        &self,
        doing: impl Into<String>,
        call: impl FnOnce(&Engine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, HostError> {
        let doing = doing.into();
        let same = doing.clone();
        self.work(doing, move |engine| call(engine).map_err(|error| host_error(same, error))).await
    }
}
