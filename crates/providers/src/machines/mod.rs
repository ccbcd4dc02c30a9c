//! This machine for who has no session: sandboxes, images and volumes of one's own, by the engine. Asks it
//! where it may block, and says its answers and errors in the words of the API.

mod disks;
mod doctor;
mod errors;
mod images;
mod sandboxes;
mod spec;

use std::{io, path::PathBuf, sync::Arc};

use harvest_engine::{Engine, EngineError};
use harvest_session::machines::MachineError;
use tokio::task::spawn_blocking;

pub use disks::look;
pub use doctor::programs;
use errors::explained;

/// The recipes that come along.
#[derive(Clone)]
pub struct Recipes {
    /// What they are called.
    pub names: Vec<String>,
    /// Writes them side by side, as they refer to each other, and says where.
    pub place: Arc<dyn Fn() -> io::Result<PathBuf> + Send + Sync>,
}

/// This machine.
#[derive(Clone)]
pub struct LocalMachines {
    engine: Engine,
    recipes: Recipes,
}

impl LocalMachines {
    /// On top of an engine.
    #[must_use]
    pub const fn new(engine: Engine, recipes: Recipes) -> Self {
        Self { engine, recipes }
    }

    /// Works on the engine where it may block.
    async fn work<T: Send + 'static>(
        &self,
        doing: impl Into<String>,
        work: impl FnOnce(&Engine) -> Result<T, MachineError> + Send + 'static,
    ) -> Result<T, MachineError> {
        let (engine, doing) = (self.engine.clone(), doing.into());
        let done = spawn_blocking(move || work(&engine)).await;
        done.unwrap_or_else(|broke| {
            Err(MachineError::Failed { doing, hint: None, source: broke.into() })
        })
    }

    /// Makes one call of the engine where it may block.
    async fn ask<T: Send + 'static>(
        &self,
        doing: impl Into<String>,
        call: impl FnOnce(&Engine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, MachineError> {
        let doing = doing.into();
        let same = doing.clone();
        self.work(doing, move |engine| call(engine).map_err(|error| explained(same, error))).await
    }
}
