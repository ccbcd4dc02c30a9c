//! Removes files from the caches in `/mnt/state/.cache` that nothing has used for two weeks, in a
//! sandbox without a network: the host never looks into a volume.

use harvest_proto::{AgentName, RepositoryName, SandboxId, bridge::Command};
use harvest_store::ComputeOwner;

use super::Repositories;
use crate::{
    checkout,
    ephemeral::{EphemeralError, EphemeralSandbox},
    error_chain::error_chain,
    sandboxes::{StartFrom, StateVolume},
};

const LIMIT_MILLIS: u64 = 10 * 60 * 1000;

/// `find` follows no link and leaves the volume alone where it is another file system.
const CLEAR: &str = "cd /mnt/state/.cache || exit 0\n\
    find . -xdev -mindepth 1 ! -type d -atime +13 -mtime +13 -delete\n\
    find . -xdev -mindepth 1 -depth -type d -mtime +13 -empty -delete";

impl Repositories {
    /// Clears the caches of every repository that has some. A failure is logged: the next day tries
    /// again.
    pub(super) async fn clear_state_caches(&self) {
        let Some(host) = self.shared.sandboxes.provider.host() else { return };
        let volumes = host.volume_list().await.unwrap_or_default();
        let owners = volumes.into_iter().filter_map(|volume| volume.owner);
        for repository in owners.filter_map(|owner| owner.parse::<RepositoryName>().ok()) {
            if let Err(error) = self.clear_state_cache(&repository).await {
                let error = error_chain(&error);
                tracing::warn!(%repository, error, "cannot clear the caches in /mnt/state");
            }
        }
    }

    async fn clear_state_cache(&self, name: &RepositoryName) -> Result<(), EphemeralError> {
        let image = self.image(None, &AgentName::default()).await?;
        let (id, from) = (SandboxId::random(), StartFrom::Image(image));
        let state = StateVolume::Repository(name.clone());
        let owner = ComputeOwner { repository: Some(name.clone()), ..ComputeOwner::default() };
        let shared = &self.shared.sandboxes;
        let sandbox = EphemeralSandbox::start_with_state(shared, id, from, state, owner).await?;
        let command = checkout::command(&["/bin/sh", "-c", CLEAR], "/", LIMIT_MILLIS);
        let cleared =
            sandbox.bridge.run_command(Command { user: Some("root".to_owned()), ..command }).await;
        sandbox.remove().await;
        let cleared = cleared?;
        match cleared.ok() {
            true => Ok(()),
            false => Err(EphemeralError::Other(cleared.tail())),
        }
    }
}
