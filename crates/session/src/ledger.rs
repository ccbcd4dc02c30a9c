//! The gateway's ledger, backed by the store: secrets, token budgets, usage and door events.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use harvest_gateway::{
    ledger::{HostSecret, HostSecretUse, Ledger, Refusal},
    vault::Vault,
};
use harvest_proto::{
    EventBody, Secret, SecretOwner, SessionId, TrafficCount, api::KeySource, event::Usage,
};
use harvest_store::{Lease, NewSecretUse, SealedSecret, Store, StoreError, Write};

use crate::{history::HistoryLimits, wall_clock::now};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const MAX_RETRY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub struct StoreLedger {
    store: Store,
    lease: Lease,
    vault: Arc<Vault>,
    budget_tokens: Option<u64>,
    history_bytes: u64,
    environment: Arc<BTreeMap<String, Secret<String>>>,
}

impl StoreLedger {
    #[must_use]
    pub fn new(store: Store, lease: Lease, vault: Arc<Vault>, budget_tokens: Option<u64>) -> Self {
        let history_bytes = HistoryLimits::default().per_session;
        Self { store, lease, vault, budget_tokens, history_bytes, environment: Arc::default() }
    }

    /// Sets the size of a session's history beyond which no more calls and refusals are stored.
    #[must_use]
    pub fn with_history(self, limits: HistoryLimits) -> Self {
        Self { history_bytes: limits.per_session, ..self }
    }

    /// Adds secrets from the server's environment. The vault takes precedence; these are never
    /// stored.
    #[must_use]
    pub fn with_environment(self, secrets: BTreeMap<String, Secret<String>>) -> Self {
        Self { environment: Arc::new(secrets), ..self }
    }

    async fn stored_secret(&self, owners: &[SecretOwner], name: &str) -> Option<Secret<String>> {
        let parsed = name.parse().ok()?;
        let found = self.store.secret_find(owners, name).await.ok()??;
        self.vault.unseal(&found.owner, &parsed, &found.sealed).ok()
    }

    /// The environment is the server's: its secrets are global.
    fn of_environment(&self, owners: &[SecretOwner], name: &str) -> Option<&Secret<String>> {
        self.environment.get(name).filter(|_| owners.contains(&SecretOwner::Global))
    }

    fn host_secret(&self, secret: &SealedSecret) -> Option<HostSecret> {
        let header = secret.binding.as_ref()?.header.parse().ok()?;
        let name = secret.name.parse().ok()?;
        let value = self.vault.unseal(&secret.owner, &name, &secret.sealed);
        let value = value.inspect_err(|error| tracing::error!(%error, "a secret is not added"));
        let (name, scope) = (secret.name.clone(), secret.owner.scope());
        Some(HostSecret { name, scope, header, value: value.ok()? })
    }

    async fn write(&self, session: &SessionId, writes: Vec<Write>) {
        let (store, lease, session) = (self.store.clone(), self.lease, session.clone());
        // In its own task: usage and events must be recorded even when the connection is dropped.
        let _written =
            tokio::spawn(async move { write_with_retry(&store, lease, &session, writes).await })
                .await;
    }
}

/// Retries with backoff, for example while the disk is full.
async fn write_with_retry(store: &Store, lease: Lease, session: &SessionId, writes: Vec<Write>) {
    let mut wait = FIRST_RETRY;
    loop {
        match store.session_commit(session, lease, now(), writes.clone()).await {
            // Builds use the door too, and have no session.
            Ok(_) | Err(StoreError::NotFound { .. }) => return,
            Err(
                error @ (StoreError::LeaseLost | StoreError::Closed | StoreError::Unknown { .. }),
            ) => {
                return tracing::error!(%session, %error, "cannot store usage or door events");
            }
            Err(error) => {
                tracing::error!(%session, %error, "cannot store usage or door events; retrying");
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(MAX_RETRY);
    }
}

#[async_trait]
impl Ledger for StoreLedger {
    async fn secret(&self, owners: &[SecretOwner], name: &str) -> Option<Secret<String>> {
        self.stored_secret(owners, name)
            .await
            .or_else(|| self.of_environment(owners, name).cloned())
    }

    async fn secret_source(&self, owners: &[SecretOwner], name: &str) -> KeySource {
        match self.stored_secret(owners, name).await {
            Some(_) => KeySource::Stored,
            None if self.of_environment(owners, name).is_some() => KeySource::Environment,
            None => KeySource::Missing,
        }
    }

    async fn host_secrets(&self, owners: &[SecretOwner], host: &str) -> Vec<HostSecret> {
        let mut found = match self.store.secrets_of(owners).await {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(%error, host, "cannot read the secrets of a host");
                return Vec::new();
            }
        };
        found.retain(|secret| secret.hosts().iter().any(|one| one == host));
        let rank = |secret: &SealedSecret| owners.iter().position(|one| *one == secret.owner);
        found.sort_by_key(rank);
        found.iter().filter_map(|secret| self.host_secret(secret)).collect()
    }

    async fn record_use(&self, session: &SessionId, used: HostSecretUse) -> Result<(), Refusal> {
        let HostSecretUse { secrets, host, method, path } = used;
        let new = |(name, scope)| NewSecretUse {
            name,
            scope,
            session: session.clone(),
            host: host.clone(),
            method: method.clone(),
            path: path.clone(),
            at: now(),
        };
        let uses = secrets.into_iter().map(new).collect();
        self.store.secret_uses_add(uses).await.map_err(|error| {
            tracing::error!(%session, %error, "cannot log the use of a secret");
            Refusal { reason: "the use of the secret could not be logged".to_owned() }
        })
    }

    async fn reserve(&self, session: &SessionId) -> Result<(), Refusal> {
        let Some(budget) = self.budget_tokens else { return Ok(()) };
        // The sessions that agents create must not multiply the budget.
        let usage = match self.store.root_usage(session).await {
            Ok(Some(usage)) => usage,
            // Builds use the door too, and have no session.
            Ok(None) => return Ok(()),
            Err(_) => return Err(Refusal { reason: "cannot read the token budget".to_owned() }),
        };
        let used = usage
            .input_tokens
            .saturating_add(usage.output_tokens)
            .saturating_add(usage.cache_read_tokens)
            .saturating_add(usage.cache_write_tokens);
        if used < budget {
            return Ok(());
        }
        let reason = format!(
            "token budget reached: {used} of {budget} tokens used; to go on, raise `budget_tokens` \
             in harvest.toml (or HARVEST_BUDGET_TOKENS) and restart the server"
        );
        Err(Refusal { reason })
    }

    async fn settle(&self, session: &SessionId, usage: Usage) {
        self.write(session, vec![Write::Usage(usage)]).await;
    }

    async fn count_traffic(&self, session: &SessionId, counts: Vec<TrafficCount>) {
        self.write(session, vec![Write::Traffic { at: now(), counts }]).await;
    }

    async fn log(&self, session: &SessionId, event: EventBody) {
        // A sandbox can cause any number of calls and refusals. A push is never left out.
        let stored = self.store.session_history_bytes(session).await;
        let full = matches!(stored, Ok(Some(stored)) if stored >= self.history_bytes);
        if full && !matches!(event, EventBody::Pushed { .. }) {
            return;
        }
        let pushed = match &event {
            EventBody::Pushed { repository, commit, .. } => {
                Some(Write::Pushed { repository: repository.clone(), commit: commit.clone() })
            }
            _ => None,
        };
        let event = Write::EventInTurn { at: now(), body: Box::new(event) };
        self.write(session, std::iter::once(event).chain(pushed).collect()).await;
    }
}
