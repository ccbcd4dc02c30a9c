//! Freezes the processes of sandboxes on this machine.

use std::time::Duration;

use async_trait::async_trait;
use harvest_proto::SandboxId;
use harvest_session::sandboxes::{FreezeControl, SandboxError};

use super::Local;

#[async_trait]
impl FreezeControl for Local {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), SandboxError> {
        let id = sandbox.clone();
        let doing = format!("cannot freeze sandbox {sandbox}");
        self.engine(doing, move |engine| engine.freeze_for(&id, hold)).await
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        let id = sandbox.clone();
        self.engine(format!("cannot thaw sandbox {sandbox}"), move |engine| engine.thaw(&id)).await
    }

    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        let id = sandbox.clone();
        self.engine(format!("cannot thaw sandbox {sandbox}"), move |engine| {
            engine.thaw_unless_saving(&id)
        })
        .await
    }
}
