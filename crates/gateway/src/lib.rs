//! The gateway: enforces the network policy, adds git credentials, forwards and meters model calls.
//! It holds the secrets, so that no sandbox has to.
//!
//! `listener` reads the request of a connection, `policy` decides whether it is allowed, and
//! `model`, `git`, `mcp`, `forge_api` or `egress` handles it. Permissions and accounting belong to
//! the [`ledger::Ledger`]; the gateway keeps no state across a restart.
#![forbid(unsafe_code)]

mod authority;
mod credentials;
mod door;
mod egress;
mod forge_api;
mod git;
mod http;
pub mod ledger;
mod listener;
mod mcp;
mod model;
mod policy;
mod private_hosts;
mod redact_stream;
mod registries;
mod traffic;
pub mod vault;

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use tokio::sync::watch;

pub use authority::{Authority, AuthorityError};
pub use credentials::{HeaderTemplate, HeaderTemplateError, normalize_host};
use door::Door;
pub use door::DoorObserver;
pub use egress::HostProxies;
pub use git::{RemoteUrlError, normalize_remote_url};
pub use harvest_proto::script::{Script, ScriptError, ScriptRule};
use harvest_proto::{
    Secret, SecretOwner, SessionId, UpstreamKind, UpstreamName,
    api::{McpService, ModelService, ServiceModels},
};
use ledger::{
    DoorPolicy, DoorPurpose, Ledger, NamedSecret, ResolvedPolicy, SecretsUnavailable, Tools,
};
pub use listener::{DoorHandle, DoorListener, DoorSocket, DoorStream};
pub use mcp::{McpServer, McpServerKind, McpServers, protocol as mcp_protocol};
pub use model::{Upstream, UpstreamError, Upstreams, check_service_url};
pub use policy::normalize_entry;
pub use private_hosts::PrivateHosts;
pub use registries::{file_registries, host_registries, registries_in, trusted_names};
use rustls::pki_types::CertificateDer;

/// Settings of all doors.
#[derive(Debug, Clone, Default)]
pub struct GatewayConfig {
    /// The services for model calls.
    pub upstreams: Upstreams,
    /// The MCP servers besides Harvest's own tools.
    pub mcp_servers: McpServers,
    /// Scripts for prompts that contain none, for the scripted model.
    pub script_rules: Vec<ScriptRule>,
    /// Hosts that may have private addresses.
    pub private_hosts: PrivateHosts,
    /// Names with a fixed address and port instead of a DNS look-up.
    pub pinned: BTreeMap<String, SocketAddr>,
    /// Hosts of public git repositories that sandboxes may fetch from.
    pub git_hosts: Vec<String>,
    /// The host's proxies for relayed connections. The HTTP clients read the same variables.
    pub proxies: HostProxies,
    /// Ends TLS connections to the hosts that secrets are for; without one, none is ended.
    pub authority: Option<Arc<Authority>>,
    /// CA certificates to verify these hosts with, besides those of this machine.
    pub extra_roots: Vec<CertificateDer<'static>>,
}

/// Opens doors. Clones share one gateway.
#[derive(Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
}

/// State shared by all doors.
pub(crate) struct Shared {
    ledger: Arc<dyn Ledger>,
    config: GatewayConfig,
    clients: http::Clients,
    upstream_tls: egress::UpstreamTls,
    failures: model::FailureCounts,
}

impl Gateway {
    #[must_use]
    pub fn new(ledger: Arc<dyn Ledger>, config: GatewayConfig) -> Self {
        let resolver = egress::PublicResolver::new(&config);
        let (clients, failures) = (http::Clients::new(resolver), model::FailureCounts::default());
        let upstream_tls = egress::UpstreamTls::default();
        Self { shared: Arc::new(Shared { ledger, config, clients, upstream_tls, failures }) }
    }

    /// The model services, and where the key of each comes from.
    pub async fn model_services(&self, owners: &[SecretOwner]) -> Vec<ModelService> {
        let mut services = Vec::new();
        for (name, upstream) in self.shared.config.upstreams.iter() {
            services.push(upstream.service(name, self.shared.ledger.as_ref(), owners).await);
        }
        services
    }

    /// The value of a secret, for the server's own requests.
    pub async fn secret(&self, owners: &[SecretOwner], name: &str) -> Option<Secret<String>> {
        self.shared.ledger.secret(owners, name).await
    }

    /// All secrets of these owners, to be masked.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn secret_values(
        &self,
        owners: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        self.shared.ledger.secret_values(owners).await
    }

    /// The MCP servers besides Harvest's own tools, and where the key of each comes from.
    pub async fn mcp_services(&self, owners: &[SecretOwner]) -> Vec<McpService> {
        let mut services = Vec::new();
        for (name, server) in self.shared.config.mcp_servers.iter() {
            services.push(server.service(name, self.shared.ledger.as_ref(), owners).await);
        }
        services
    }

    /// Hosts of public git repositories, which the git door serves.
    #[must_use]
    pub fn git_hosts(&self) -> &[String] {
        &self.shared.config.git_hosts
    }

    /// The kind of a model service; `None` when there is none of this name.
    #[must_use]
    pub fn upstream_kind(&self, name: &UpstreamName) -> Option<UpstreamKind> {
        self.shared.config.upstreams.get(name).map(|upstream| upstream.kind)
    }

    /// The model services, or one of them, and the models that each lists now.
    pub async fn models(
        &self,
        owners: &[SecretOwner],
        only: Option<&UpstreamName>,
    ) -> Vec<ServiceModels> {
        let asked = self.shared.config.upstreams.iter();
        let asked = asked.filter(|(name, _)| only.is_none_or(|only| only == *name));
        let list = |(name, upstream)| model::list_models(&self.shared, name, upstream, owners);
        futures_util::future::join_all(asked.map(list)).await
    }

    /// Opens a sandbox's door: serves its connections until the handle is dropped. Its events go
    /// to the observer if there is one, else to the ledger. Without tools there is no tools door.
    /// Must be called within a tokio runtime.
    pub fn open(
        &self,
        listener: Box<dyn DoorListener>,
        policy: DoorPolicy,
        observer: Option<DoorObserver>,
        tools: Option<Arc<dyn Tools>>,
    ) -> DoorHandle {
        DoorHandle::open(Door::new(Arc::clone(&self.shared), policy, observer, tools), listener)
    }

    /// As [`Gateway::open`], for a sandbox without a session: its door leads to names only, not to
    /// models, repositories and tools.
    pub fn open_for_names(
        &self,
        listener: Box<dyn DoorListener>,
        network: watch::Receiver<ResolvedPolicy>,
        observer: DoorObserver,
    ) -> DoorHandle {
        let policy = DoorPolicy {
            session: SessionId::random(),
            network,
            upstream: watch::channel(UpstreamName::scripted()).1,
            repositories: Vec::new(),
            secrets: Vec::new(),
            purpose: DoorPurpose::Work,
        };
        let mut door = Door::new(Arc::clone(&self.shared), policy, Some(observer), None);
        door.names_only = true;
        DoorHandle::open(door, listener)
    }
}
