//! The door of a sandbox that waits in the pool. It leads nowhere, and shows the agent the tools of
//! its later session, because agents look for them once, when they start.

use std::{any::Any, sync::Arc};

use async_trait::async_trait;
use harvest_gateway::ledger::{DoorPolicy, DoorPurpose, ResolvedPolicy, ToolResult, Tools};
use harvest_proto::{NetworkPolicy, SandboxId, SessionId, UpstreamName};
use serde_json::Value;
use tokio::sync::{Notify, watch};

use crate::{sandbox_context::SandboxContext, sandboxes::SandboxError};

/// An open door; closed when dropped.
pub(super) struct StandbyDoor {
    _door: Box<dyn Any + Send>,
    /// Notified when the agent has listed its tools.
    pub(super) listed: Arc<Notify>,
}

impl StandbyDoor {
    pub(super) async fn open(
        context: &SandboxContext,
        sandbox: &SandboxId,
        definitions: fn() -> Vec<Value>,
    ) -> Result<Self, SandboxError> {
        let listener = context.provider.listen(sandbox).await?;
        let listed = Arc::<Notify>::default();
        let tools = StandbyTools { definitions, listed: Arc::clone(&listed) };
        // Its refusals belong to no session, so they are not stored.
        let observer = Box::new(drop);
        let door = context.doors.open(listener, policy(), Some(observer), Some(Arc::new(tools)));
        Ok(Self { _door: door, listed })
    }
}

/// Of no session: without repositories, secrets, names, and models of any service.
fn policy() -> DoorPolicy {
    let network = ResolvedPolicy {
        base: NetworkPolicy::None,
        trusted: Arc::default(),
        rules: Vec::new(),
        owner: String::new(),
    };
    DoorPolicy {
        session: SessionId::random(),
        network: watch::channel(network).1,
        upstream: watch::channel(UpstreamName::scripted()).1,
        repositories: Vec::new(),
        secrets: Vec::new(),
        purpose: DoorPurpose::Work,
    }
}

struct StandbyTools {
    definitions: fn() -> Vec<Value>,
    listed: Arc<Notify>,
}

#[async_trait]
impl Tools for StandbyTools {
    fn list(&self) -> Vec<Value> {
        self.listed.notify_one();
        (self.definitions)()
    }

    async fn call(&self, _: &str, _: Value) -> Option<ToolResult> {
        let text = "the sandbox does not belong to a session yet".to_owned();
        Some(ToolResult { text, structured: None, failed: true })
    }
}
