//! Freezes the processes of sandboxes on this machine.

use std::time::Duration;

use async_trait::async_trait;
use harvest_engine::Engine;
use harvest_proto::SandboxId;
use harvest_session::sandboxes::{FreezeControl, SandboxError};

use super::Local;

#[async_trait]
impl FreezeControl for Local {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), SandboxError> {
        self.on(sandbox, "freeze sandbox", move |engine, id| engine.freeze_for(id, hold)).await
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.on(sandbox, "thaw sandbox", Engine::thaw).await
    }

    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.on(sandbox, "thaw sandbox", Engine::thaw_unless_saving).await
    }
}
