//! The request for a sandbox. Plain data.

use std::collections::BTreeMap;

use harvest_proto::{
    RepositoryName, SandboxId, SnapshotId,
    api::{
        CreateSandbox, Sandbox, SandboxDoor, SandboxLimits, SandboxNetwork, SandboxOwner,
        VolumeMount,
    },
};

use super::{SandboxError, allow_rules};

/// The image of a request that names none.
const DEFAULT_IMAGE: &str = "base";

/// A sandbox to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxSpec {
    /// Chosen and stored before the sandbox exists, so that a crash leaves no orphan.
    pub id: SandboxId,
    pub from: StartFrom,
    /// Decides how long it lives.
    pub owner: SandboxOwner,
    /// The user who creates it; `None` without a server.
    pub made_by: Option<String>,
    /// The provider's defaults for absent ones.
    pub limits: SandboxLimits,
    pub network: SandboxNetwork,
    /// What a standalone sandbox reaches with the network `Gateway`.
    pub door: Option<SandboxDoor>,
    pub volumes: Vec<VolumeMount>,
    /// Environment variables added to the image's.
    pub env: BTreeMap<String, String>,
    /// The volume at `/mnt/state`. A provider without room for it starts the sandbox without.
    pub state: Option<StateVolume>,
}

/// The origin of a sandbox's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFrom {
    Image(String),
    Snapshot(SnapshotId),
}

/// The volume at `/mnt/state`, which outlives sandboxes and is in no snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateVolume {
    /// Shared by the sessions of a repository.
    Repository(RepositoryName),
    /// Shared by all standalone sandboxes.
    Standalone,
}

impl SandboxSpec {
    /// A sandbox of a session, a build or a check, with the gateway as its network.
    #[must_use]
    pub fn of_session(id: SandboxId, from: StartFrom, limits: SandboxLimits) -> Self {
        Self {
            id,
            from,
            owner: SandboxOwner::Session,
            made_by: None,
            limits,
            network: SandboxNetwork::Gateway,
            door: None,
            volumes: Vec::new(),
            env: BTreeMap::new(),
            state: None,
        }
    }

    /// A sandbox that a user asks for.
    ///
    /// # Errors
    /// When the request contradicts itself.
    pub fn standalone(
        id: SandboxId,
        owner: SandboxOwner,
        made_by: Option<String>,
        order: CreateSandbox,
    ) -> Result<Self, SandboxError> {
        let from = match (order.image, order.from) {
            (Some(_), Some(_)) => {
                let what = "give either `image` or `from`, not both";
                return Err(SandboxError::invalid("invalid_sandbox", what));
            }
            (image, None) => StartFrom::Image(image.unwrap_or_else(|| DEFAULT_IMAGE.to_owned())),
            (None, Some(snapshot)) => StartFrom::Snapshot(snapshot),
        };
        let door = match (order.network, order.door) {
            (SandboxNetwork::Gateway, door) => Some(door.unwrap_or_default()),
            (_, None) => None,
            (_, Some(_)) => {
                let what = "`door` is only for the network `gateway`";
                return Err(SandboxError::invalid("invalid_sandbox", what));
            }
        };
        door.as_ref().map(allow_rules).transpose()?;
        Ok(Self {
            id,
            from,
            owner,
            made_by,
            limits: order.limits,
            network: order.network,
            door,
            volumes: order.volumes,
            env: order.env,
            state: order.state.unwrap_or(true).then_some(StateVolume::Standalone),
        })
    }

    /// A standalone sandbox like this one, with the disk of a snapshot.
    pub(super) fn copy_of(source: &Sandbox, snapshot: &SnapshotId) -> Self {
        Self {
            id: source.id.clone(),
            from: StartFrom::Snapshot(snapshot.clone()),
            owner: SandboxOwner::Standalone,
            made_by: source.made_by.clone(),
            limits: source.limits,
            // That of a session has no door without the session.
            network: match (source.network, &source.door) {
                (SandboxNetwork::Gateway, None) => SandboxNetwork::None,
                (network, _) => network,
            },
            door: source.door.clone(),
            // The state volume is one of them.
            volumes: source.volumes.clone(),
            env: source.env.clone(),
            state: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(order: CreateSandbox) -> Result<SandboxSpec, SandboxError> {
        SandboxSpec::standalone(SandboxId::random(), SandboxOwner::Standalone, None, order)
    }

    #[test]
    fn standalone_sandbox_has_safe_defaults() {
        let spec = spec(CreateSandbox::default()).unwrap();
        assert_eq!(spec.from, StartFrom::Image("base".into()));
        assert_eq!(
            (spec.network, spec.state),
            (SandboxNetwork::None, Some(StateVolume::Standalone))
        );
    }

    #[test]
    fn contradictory_requests_are_refused() {
        let both = CreateSandbox {
            image: Some("base".into()),
            from: Some(SnapshotId::random()),
            ..CreateSandbox::default()
        };
        let door = Some(SandboxDoor::default());
        let closed = CreateSandbox { door, ..CreateSandbox::default() };
        let door = SandboxDoor { allow: vec!["10.0.0.1".to_owned()], ..SandboxDoor::default() };
        let network = SandboxNetwork::Gateway;
        let address = CreateSandbox { network, door: Some(door), ..CreateSandbox::default() };
        for order in [both, closed, address] {
            assert!(spec(order.clone()).is_err(), "{order:?}");
        }
    }
}
