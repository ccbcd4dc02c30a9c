//! Ephemeral sandboxes: created for one command, build or check, and removed afterwards, even when
//! the caller goes away.

use std::time::Duration;

use harvest_proto::SandboxId;
use tokio::{runtime::Handle, sync::oneshot};

use super::{BridgeStream, Created, SandboxError, SandboxSpec, Sandboxes, slots::SandboxSlot};
use crate::error_chain::error_chain;

// Removing takes milliseconds, more on a busy disk. Shutdown waits no longer than this; the zygote
// or the next server removes the rest.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Removes an ephemeral sandbox, at the latest on drop.
pub(crate) struct EphemeralGuard {
    sandboxes: Sandboxes,
    sandbox: SandboxId,
    slot: Option<SandboxSlot>,
    runtime: Handle,
    removed: bool,
}

impl Sandboxes {
    /// Creates an ephemeral sandbox and connects to it. Runs in its own task, so that a caller that
    /// goes away cannot leak a half-created sandbox.
    pub(crate) async fn create_ephemeral(
        &self,
        spec: SandboxSpec,
        slot: Option<SandboxSlot>,
    ) -> Result<(EphemeralGuard, Created, Box<dyn BridgeStream>), SandboxError> {
        let (sandboxes, runtime) = (self.clone(), Handle::current());
        let (sender, created) = oneshot::channel();
        self.tasks.spawn_to_completion(async move {
            let sandbox = spec.id.clone();
            let guard = EphemeralGuard { sandboxes, sandbox, slot, runtime, removed: false };
            let created = guard.sandboxes.provider.create_connected(spec).await;
            // Without a receiver the guard is dropped here, before this task ends.
            let _ = sender.send(created.map(|(created, stream)| (guard, created, stream)));
        });
        created
            .await
            .unwrap_or_else(|gone| Err(SandboxError::failed("cannot start a sandbox", gone)))
    }
}

impl EphemeralGuard {
    pub(crate) fn sandbox(&self) -> &SandboxId {
        &self.sandbox
    }

    /// Removes the sandbox now.
    pub(crate) async fn remove(mut self) {
        remove(&self.sandboxes, &self.sandbox, self.slot.take()).await;
        self.removed = true;
    }

    /// The sandbox was removed by other means.
    pub(crate) fn forget(mut self) {
        self.removed = true;
    }
}

impl Drop for EphemeralGuard {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        let (sandboxes, sandbox) = (self.sandboxes.clone(), self.sandbox.clone());
        let slot = self.slot.take();
        let removing = async move { remove(&sandboxes, &sandbox, slot).await };
        let _runtime = self.runtime.enter();
        self.sandboxes.tasks.spawn_to_completion(removing);
    }
}

async fn remove(sandboxes: &Sandboxes, sandbox: &SandboxId, slot: Option<SandboxSlot>) {
    if let Some(meter) = &sandboxes.meter {
        meter.end(sandbox).await;
    }
    let removed = tokio::time::timeout(REMOVE_TIMEOUT, sandboxes.provider.remove(sandbox)).await;
    let error = match removed {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error_chain(&error)),
        Err(_) => Some("it takes too long".to_owned()),
    };
    if let Some(error) = error {
        tracing::warn!(%sandbox, error, "cannot remove an ephemeral sandbox");
        slot.into_iter().for_each(|slot| slot.watch(sandboxes));
    }
}
