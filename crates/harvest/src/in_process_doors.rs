//! The gateway of a command without a server: doors of standalone sandboxes, for as long as the
//! command runs. It has no secrets.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_gateway::{
    Gateway, GatewayConfig, HostProxies, PrivateHosts, file_registries,
    ledger::{
        HostSecret, HostSecretUse, Ledger, NamedSecret, PlannedCall, Refusal, ResolvedPolicy,
        SecretsUnavailable, TrustedName, Used,
    },
    trusted_names,
};
use harvest_proto::{
    EventBody, Secret, SecretOwner, SessionId, TrafficCount,
    api::{KeySource, SandboxDoor},
    event::Usage,
};
use harvest_session::{
    DoorListener, DoorObserver,
    sandboxes::{DoorGuard, SandboxError, StandaloneDoors, allow_rules},
};

use crate::{
    config::{Config, process_env},
    server_process::told_registries,
};

pub(crate) struct InProcessDoors {
    private_hosts: Vec<String>,
    trusted: Vec<String>,
}

impl InProcessDoors {
    pub(crate) fn new(config: &Config) -> Self {
        Self { private_hosts: config.private_hosts.clone(), trusted: config.trusted.clone() }
    }
}

#[async_trait]
impl StandaloneDoors for InProcessDoors {
    async fn open(
        &self,
        listener: Box<dyn DoorListener>,
        door: &SandboxDoor,
        observer: DoorObserver,
    ) -> Result<DoorGuard, SandboxError> {
        // Asking the host's package clients would take seconds.
        let of_host = file_registries().into_iter().chain(told_registries()).collect();
        let trusted = trusted_names(of_host, &self.trusted);
        let policy = ResolvedPolicy {
            base: door.policy,
            trusted: trusted.into_iter().map(TrustedName::from).collect(),
            rules: allow_rules(door)?,
            owner: String::new(),
        };
        let config = GatewayConfig {
            private_hosts: PrivateHosts::new(self.private_hosts.clone()),
            proxies: HostProxies::from_variables(process_env),
            ..GatewayConfig::default()
        };
        let gateway = Gateway::new(Arc::new(NoSecrets), config);
        Ok(Box::new(gateway.open_for_names(listener, policy.fixed(), observer)))
    }
}

/// The ledger of doors without a session: they use no secrets and no models.
struct NoSecrets;

#[async_trait]
impl Ledger for NoSecrets {
    async fn secret(&self, _: &[SecretOwner], _: &str) -> Option<Secret<String>> {
        None
    }

    async fn secret_source(&self, _: &[SecretOwner], _: &str) -> KeySource {
        KeySource::Missing
    }

    async fn secret_values(
        &self,
        _: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        Ok(Vec::new())
    }

    async fn host_secrets(&self, _: &[SecretOwner], _: &str) -> Vec<HostSecret> {
        Vec::new()
    }

    async fn record_use(&self, _: &SessionId, _: HostSecretUse) -> Result<(), Refusal> {
        Err(Refusal::Final("there is no server".to_owned()))
    }

    async fn reserve(&self, _: &SessionId, _: &PlannedCall) -> Result<(), Refusal> {
        Err(Refusal::Final("there is no server".to_owned()))
    }

    async fn settle(&self, _: &SessionId, _: &PlannedCall, _: Used) -> Usage {
        Usage::default()
    }

    async fn log(&self, _: &SessionId, _: EventBody) {}

    async fn count_traffic(&self, _: &SessionId, _: Vec<TrafficCount>) {}
}
