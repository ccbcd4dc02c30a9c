//! The trait by which sandboxes get their doors; the gateway implements it.

use std::{any::Any, sync::Arc};

use async_trait::async_trait;
use harvest_gateway::{
    DoorListener, DoorObserver, Gateway,
    ledger::{DoorPolicy, GitAccess, NamedSecret, ResolvedPolicy, SecretsUnavailable, Tools},
};
use harvest_proto::{
    BranchName, Secret, SecretOwner, UpstreamKind, UpstreamName,
    api::{McpService, ModelService, ServiceModels},
};
use tokio::sync::watch;

/// Opens doors for sandboxes, and looks at git remotes as they do.
#[async_trait]
pub trait Doors: Send + Sync {
    /// Serves one sandbox's door until the returned guard is dropped. An observer receives the
    /// door's events in place of the session in the policy. The tools are those of a session.
    fn open(
        &self,
        listener: Box<dyn DoorListener>,
        policy: DoorPolicy,
        observer: Option<DoorObserver>,
        tools: Option<Arc<dyn Tools>>,
    ) -> Box<dyn Any + Send>;

    /// As `open`, for a sandbox without a session: its door leads to names only.
    fn open_for_names(
        &self,
        _listener: Box<dyn DoorListener>,
        _network: watch::Receiver<ResolvedPolicy>,
        _observer: DoorObserver,
    ) -> Box<dyn Any + Send> {
        Box::new(())
    }

    /// Checks that a URL is the remote of a git repository, with the secrets of these owners. The
    /// error is a sentence.
    async fn check_remote(
        &self,
        _access: &GitAccess,
        _owners: &[SecretOwner],
    ) -> Result<(), String> {
        Ok(())
    }

    /// The commit of a remote's branch, or of its default branch; `Some(None)` when it has no such
    /// branch, and `None` when it did not say.
    async fn tip(
        &self,
        _access: &GitAccess,
        _owners: &[SecretOwner],
        _branch: Option<&BranchName>,
    ) -> Option<Option<String>> {
        None
    }

    /// The value of a secret, for the server's own requests; that of the first owner that has it.
    async fn secret(&self, _owners: &[SecretOwner], _name: &str) -> Option<Secret<String>> {
        None
    }

    /// All secrets of these owners, to be masked.
    async fn secret_values(
        &self,
        _owners: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        Ok(Vec::new())
    }

    /// The model services behind the doors, and where the key of each comes from.
    async fn model_services(&self, _owners: &[SecretOwner]) -> Vec<ModelService> {
        ModelService::built_in()
    }

    /// The model services, or one of them, and the models that each lists now.
    async fn models(
        &self,
        _owners: &[SecretOwner],
        _only: Option<&UpstreamName>,
    ) -> Vec<ServiceModels> {
        Vec::new()
    }

    /// The MCP servers behind the doors besides Harvest's own tools, and where the key of each
    /// comes from.
    async fn mcp_services(&self, _owners: &[SecretOwner]) -> Vec<McpService> {
        Vec::new()
    }

    /// Hosts of public git repositories, which the git door serves.
    fn git_hosts(&self) -> Vec<String> {
        Vec::new()
    }

    /// The kind of a model service; `None` when there is none of this name.
    fn upstream_kind(&self, name: &UpstreamName) -> Option<UpstreamKind> {
        let found = ModelService::built_in().into_iter().find(|service| service.name == *name);
        found.map(|service| service.kind)
    }
}

#[async_trait]
impl Doors for Gateway {
    fn open(
        &self,
        listener: Box<dyn DoorListener>,
        policy: DoorPolicy,
        observer: Option<DoorObserver>,
        tools: Option<Arc<dyn Tools>>,
    ) -> Box<dyn Any + Send> {
        Box::new(Self::open(self, listener, policy, observer, tools))
    }

    fn open_for_names(
        &self,
        listener: Box<dyn DoorListener>,
        network: watch::Receiver<ResolvedPolicy>,
        observer: DoorObserver,
    ) -> Box<dyn Any + Send> {
        Box::new(Self::open_for_names(self, listener, network, observer))
    }

    async fn check_remote(&self, access: &GitAccess, owners: &[SecretOwner]) -> Result<(), String> {
        Self::check_remote(self, access, owners).await
    }

    async fn tip(
        &self,
        access: &GitAccess,
        owners: &[SecretOwner],
        branch: Option<&BranchName>,
    ) -> Option<Option<String>> {
        Self::tip(self, access, owners, branch.map(|branch| branch.as_str())).await
    }

    async fn secret(&self, owners: &[SecretOwner], name: &str) -> Option<Secret<String>> {
        Self::secret(self, owners, name).await
    }

    async fn secret_values(
        &self,
        owners: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        Self::secret_values(self, owners).await
    }

    async fn model_services(&self, owners: &[SecretOwner]) -> Vec<ModelService> {
        Self::model_services(self, owners).await
    }

    async fn models(
        &self,
        owners: &[SecretOwner],
        only: Option<&UpstreamName>,
    ) -> Vec<ServiceModels> {
        Self::models(self, owners, only).await
    }

    async fn mcp_services(&self, owners: &[SecretOwner]) -> Vec<McpService> {
        Self::mcp_services(self, owners).await
    }

    fn git_hosts(&self) -> Vec<String> {
        Self::git_hosts(self).to_vec()
    }

    fn upstream_kind(&self, name: &UpstreamName) -> Option<UpstreamKind> {
        Self::upstream_kind(self, name)
    }
}
