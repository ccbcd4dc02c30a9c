//! The doors of standalone sandboxes: names only, without a model, git or tools. A door is open as
//! long as its sandbox runs and this process lives; the next server opens it again.

use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock},
};

use async_trait::async_trait;
use harvest_gateway::{DoorListener, DoorObserver, normalize_entry};
use harvest_proto::{
    EventBody, RuleScope, RuleVerdict, SandboxId,
    api::{NetworkRule, SandboxDoor, SandboxOwner, SandboxStatus, SetNetworkRule},
};

use super::{SandboxError, Sandboxes};
use crate::error_chain::error_chain;

/// Keeps a door open.
pub type DoorGuard = Box<dyn Any + Send>;

/// Opens doors for standalone sandboxes.
#[async_trait]
pub trait StandaloneDoors: Send + Sync {
    /// Serves a sandbox's door until the guard is dropped.
    async fn open(
        &self,
        listener: Box<dyn DoorListener>,
        door: &SandboxDoor,
        observer: DoorObserver,
    ) -> Result<DoorGuard, SandboxError>;
}

#[derive(Default)]
pub(super) struct OpenDoors {
    opener: OnceLock<Arc<dyn StandaloneDoors>>,
    open: tokio::sync::Mutex<HashMap<SandboxId, Mutex<DoorGuard>>>,
}

impl Sandboxes {
    /// Sets what opens the doors of standalone sandboxes. Without it they have none.
    #[must_use]
    pub fn with_doors(self, opener: Arc<dyn StandaloneDoors>) -> Self {
        self.provider.set_doors(Arc::clone(&opener));
        let _ = self.doors.opener.set(opener);
        self
    }

    /// Opens the door of a running sandbox, if it has one and it is not open.
    pub(super) async fn open_door(
        &self,
        sandbox: &SandboxId,
        door: Option<&SandboxDoor>,
    ) -> Result<(), SandboxError> {
        let Some(door) = door else { return Ok(()) };
        let mut open = self.doors.open.lock().await;
        if !open.contains_key(sandbox) {
            let guard = self.new_door(sandbox, door).await?;
            open.insert(sandbox.clone(), Mutex::new(guard));
        }
        Ok(())
    }

    /// Opens a door that the caller keeps.
    pub(super) async fn new_door(
        &self,
        sandbox: &SandboxId,
        door: &SandboxDoor,
    ) -> Result<DoorGuard, SandboxError> {
        let Some(opener) = self.doors.opener.get() else {
            let what = "standalone sandboxes have no gateway here";
            return Err(SandboxError::invalid("unsupported", what));
        };
        let listener = self.provider.listen(sandbox).await?;
        opener.open(listener, door, log_refusals(sandbox.clone())).await
    }

    pub(super) async fn close_door(&self, sandbox: &SandboxId) {
        self.doors.open.lock().await.remove(sandbox);
    }

    /// Opens the doors of the standalone sandboxes that an earlier server left running.
    pub(crate) async fn open_doors(&self) {
        let Ok(all) = self.provider.get_all().await else { return };
        let standalone = all.items.iter().filter(|one| {
            one.owner == SandboxOwner::Standalone && one.state == SandboxStatus::Running
        });
        for sandbox in standalone {
            if let Err(error) = self.open_door(&sandbox.id, sandbox.door.as_ref()).await {
                let error = error_chain(&error);
                tracing::warn!(sandbox = %sandbox.id, error, "a sandbox has no network");
            }
        }
    }
}

fn log_refusals(sandbox: SandboxId) -> DoorObserver {
    Box::new(move |event| {
        if let EventBody::EgressRefused { name, reason, .. } = event {
            tracing::warn!(%sandbox, name, reason, "refused a connection; `--allow NAME` allows it");
        }
    })
}

/// The rules of a door's names, each `NAME` or `NAME:PORT`.
///
/// # Errors
/// When a text is not a host name.
pub fn allow_rules(door: &SandboxDoor) -> Result<Vec<NetworkRule>, SandboxError> {
    door.allow.iter().map(|text| allow_rule(text)).collect()
}

fn allow_rule(text: &str) -> Result<NetworkRule, SandboxError> {
    let invalid = || {
        let what = format!("`{text}` is not a host name or NAME:PORT");
        SandboxError::invalid("invalid_name", what)
    };
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => {
            (name, Some(port.parse().ok().filter(|port| *port > 0).ok_or_else(invalid)?))
        }
        None => (text, None),
    };
    let verdict = RuleVerdict::Allow;
    let set = SetNetworkRule { verdict, ports: port.into_iter().collect(), private: false };
    let (name, ports) = (normalize_entry(name).ok_or_else(invalid)?, set.effective_ports());
    Ok(NetworkRule { name, verdict, ports, private: false, scope: RuleScope::Session })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_names_may_have_a_port() {
        let rule = |text| allow_rule(text).map(|rule| (rule.name, rule.ports)).ok();
        assert_eq!(rule("Example.org"), Some(("example.org".to_owned(), vec![80, 443])));
        assert_eq!(rule("*.example.org:5432"), Some(("*.example.org".to_owned(), vec![5432])));
        for text in ["", "*", "10.0.0.1", "a.org:0", "a.org:x", "a.org:1:2", "https://a.org"] {
            assert_eq!(rule(text), None, "{text}");
        }
    }
}
