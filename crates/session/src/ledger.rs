//! The gateway's ledger, backed by the store: secrets, budgets, usage and door events.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use harvest_forge::{Forge, ForgeFailure, Operation};
use harvest_gateway::{
    ledger::{
        BegunPush, HostSecret, HostSecretUse, Ledger, NamedSecret, PlannedCall, Refusal,
        SecretsUnavailable, Used,
    },
    vault::Vault,
};
use harvest_proto::{
    BUDGET_REACHED, EventBody, Hint as _, Money, RepositoryName, Secret, SecretOwner, SessionId,
    SpendingScope, TrafficCount,
    api::{Budget, KeySource},
    event::Usage,
};
use harvest_store::{
    Lease, NewCall, NewSecretUse, OverBudget, SealedSecret, Store, StoreError, Write,
};

use crate::{error_chain::error_chain, history::HistoryLimits, prices::Prices, wall_clock::now};

// Each leaves a reference at the remote.
const MAX_REPLACED: u64 = 100;

const FIRST_RETRY: Duration = Duration::from_millis(50);
const MAX_RETRY: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub struct StoreLedger {
    store: Store,
    lease: Lease,
    vault: Arc<Vault>,
    budget_tokens: Option<u64>,
    history_bytes: u64,
    prices: Arc<Prices>,
    environment: Arc<BTreeMap<String, Secret<String>>>,
    forge: Option<Arc<dyn Forge>>,
}

impl StoreLedger {
    #[must_use]
    pub fn new(store: Store, lease: Lease, vault: Arc<Vault>, budget_tokens: Option<u64>) -> Self {
        let history_bytes = HistoryLimits::default().per_session;
        let (prices, environment, forge) = Default::default();
        Self { store, lease, vault, budget_tokens, history_bytes, prices, environment, forge }
    }

    /// Sets what model calls cost.
    #[must_use]
    pub fn with_prices(self, prices: Prices) -> Self {
        Self { prices: Arc::new(prices), ..self }
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

    /// Adds the forges whose sign-in opens repositories that have no secret.
    #[must_use]
    pub fn with_forge(self, forge: Arc<dyn Forge>) -> Self {
        Self { forge: Some(forge), ..self }
    }

    /// The forge, if it has the repository at this URL and is not the local one.
    fn forge_of(&self, url: &str) -> Option<&Arc<dyn Forge>> {
        self.forge.as_ref().filter(|forge| forge.owns(url) && !forge.is_local(url))
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
        // In its own task: events must be recorded even when the connection is dropped.
        let _written = tokio::spawn(async move {
            let commit = async || {
                store.session_commit(&session, lease, now(), writes.clone()).await.map(drop)
            };
            retry(commit).await;
        })
        .await;
    }
}

/// Retries a write with backoff, for example while the disk is full.
async fn retry<F: Future<Output = Result<(), StoreError>> + Send>(mut write: impl FnMut() -> F) {
    let mut wait = FIRST_RETRY;
    loop {
        match write().await {
            // Builds use the door too, and have no session.
            Ok(()) | Err(StoreError::NotFound { .. }) => return,
            Err(
                error @ (StoreError::LeaseLost | StoreError::Closed | StoreError::Unknown { .. }),
            ) => {
                return tracing::error!(%error, "cannot store usage or door events");
            }
            Err(error) => tracing::error!(%error, "cannot store usage or door events; retrying"),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(MAX_RETRY);
    }
}

/// Why a call is refused, and which command raises the limit.
fn refusal(session: &SessionId, call: &PlannedCall, over: &OverBudget) -> Refusal {
    let reason = match over {
        OverBudget::Tokens { used, limit } => format!(
            "token {BUDGET_REACHED}{used} of {limit} tokens used; to go on, raise `budget_tokens` \
             in harvest.toml (or HARVEST_BUDGET_TOKENS) and restart the server"
        ),
        OverBudget::Money { budget, call } => {
            let (limit, raise) = describe(session, budget);
            let Budget { spent_micros: spent, held_micros: held, .. } = budget;
            let held = match *held {
                Money::ZERO => String::new(),
                held => format!(", {held} held for calls in progress"),
            };
            format!(
                "{BUDGET_REACHED}{limit}: {spent} spent{held}, and the next call may cost {call}; \
                 to go on, raise it: {raise}"
            )
        }
        OverBudget::Unpriced { budget } => {
            let (limit, raise) = describe(session, budget);
            let PlannedCall { upstream, model, fallbacks, .. } = call;
            let others = if fallbacks.is_empty() { "" } else { ", or of one in `models`," };
            format!(
                "{BUDGET_REACHED}{limit}, and the price of the model `{model}` of \
                 `{upstream}`{others} is not known; add it to the file that the setting `prices` \
                 names and restart the server, or remove the limit: {raise}"
            )
        }
    };
    match over.may_fit_later() {
        true => Refusal::Retry(reason),
        false => Refusal::Final(reason),
    }
}

/// A limit in words, and the command that changes it.
fn describe(session: &SessionId, budget: &Budget) -> (String, String) {
    let Budget { scope, name, budget_micros, .. } = budget;
    let limit = budget_micros.unwrap_or_default();
    let of = match scope {
        // A session that an agent created has the budget of its root.
        SpendingScope::Session if *name == session.to_string() => "this session".to_owned(),
        SpendingScope::Session => format!("session {name}"),
        SpendingScope::Repository => format!("repository {name}"),
        SpendingScope::User => format!("user {name}"),
        SpendingScope::Day => format!("the day {name} (UTC)"),
    };
    (format!("{limit} for {of}"), format!("`{}`", raise_command(*scope, name)))
}

/// The command that raises a budget.
pub(crate) fn raise_command(scope: SpendingScope, name: &str) -> String {
    let target = match scope {
        SpendingScope::Session => name.to_owned(),
        SpendingScope::Repository => format!("--repository {name}"),
        SpendingScope::User => format!("--user {name}"),
        SpendingScope::Day => "--day".to_owned(),
    };
    format!("harvest budget {target} AMOUNT")
}

/// A push that cannot be recorded is not sent.
fn unrecorded(session: &SessionId, error: &StoreError) -> Refusal {
    tracing::error!(%session, error = error_chain(error), "cannot record a push");
    Refusal::Retry("the server cannot use its database; push again".to_owned())
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

    async fn secret_values(
        &self,
        owners: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        let stored = self.store.secrets_of(owners).await.map_err(|error| {
            tracing::error!(error = error_chain(&error), "cannot read secrets");
            SecretsUnavailable
        })?;
        let open = |secret: SealedSecret| {
            let name = secret.name.parse().ok()?;
            let value = self.vault.unseal(&secret.owner, &name, &secret.sealed).ok()?;
            Some(NamedSecret { name: secret.name, value })
        };
        let global = owners.contains(&SecretOwner::Global);
        let environment = self.environment.iter().filter(|_| global);
        let environment = environment
            .map(|(name, value)| NamedSecret { name: name.clone(), value: value.clone() });
        Ok(stored.into_iter().filter_map(open).chain(environment).collect())
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

    fn takes_github_token(&self, url: &str) -> bool {
        self.forge_of(url).is_some()
    }

    async fn git_credential(
        &self,
        url: &str,
        push: bool,
    ) -> Result<Option<Secret<String>>, String> {
        let Some(forge) = self.forge_of(url) else { return Ok(None) };
        let operation = if push { Operation::Push } else { Operation::Fetch };
        match forge.credential(url, operation).await {
            Ok(credential) => Ok(credential),
            // A public repository can be fetched without the App.
            Err(ForgeFailure::NotInstalled { .. }) if !push => Ok(None),
            Err(failure) => {
                let hint = failure.hint().map_or_else(String::new, |hint| format!("; {hint}"));
                let why = error_chain(&failure);
                tracing::warn!(url, why, "no credential for a git remote");
                Err(format!("{why}{hint}"))
            }
        }
    }

    fn git_credential_refused(&self, url: &str, refused: &Secret<String>) {
        if let Some(forge) = self.forge_of(url) {
            forge.forget_credential(url, refused);
        }
    }

    async fn has_pushed(
        &self,
        session: &SessionId,
        repository: &RepositoryName,
        commit: &str,
    ) -> Result<bool, Refusal> {
        let known = self.store.has_pushed(session, repository, commit).await;
        known.map_err(|error| unrecorded(session, &error))
    }

    async fn push_begins(
        &self,
        session: &SessionId,
        repository: &RepositoryName,
        push: BegunPush<'_>,
    ) -> Result<(), Refusal> {
        if push.replaces {
            let count = self.store.replaced_commits(session, repository).await;
            let count = count.map_err(|error| unrecorded(session, &error))?;
            if count >= MAX_REPLACED {
                return Err(Refusal::Final(format!(
                    "this session has replaced {MAX_REPLACED} commits of its branch; push on top \
                     of it, or start another session"
                )));
            }
        }
        let (repository, replaces) = (repository.clone(), push.replaces);
        let (old, new) = (push.old.to_owned(), push.new.to_owned());
        let begun = Write::PushBegun { repository, old, new, replaces };
        match self.store.session_commit(session, self.lease, now(), vec![begun]).await {
            Ok(_) => Ok(()),
            Err(error) => Err(unrecorded(session, &error)),
        }
    }

    async fn push_refused(&self, session: &SessionId, repository: &RepositoryName, commit: &str) {
        let (repository, commit) = (repository.clone(), commit.to_owned());
        self.write(session, vec![Write::PushFailed { repository, commit }]).await;
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
            Refusal::Retry("the use of the secret could not be logged".to_owned())
        })
    }

    async fn reserve(&self, session: &SessionId, call: &PlannedCall) -> Result<(), Refusal> {
        let pricing = self.prices.of(call);
        let most = pricing.most(call.most);
        let new = NewCall {
            id: call.id.clone(),
            session: session.clone(),
            upstream: call.upstream.clone(),
            model: call.model.clone(),
            most,
            cost: pricing.cost(most),
            at: now(),
        };
        match self.store.call_begin(self.lease, new, self.budget_tokens).await {
            Ok(begun) => begun.map_err(|over| refusal(session, call, &over)),
            Err(error) => {
                tracing::error!(%session, error = error_chain(&error), "cannot reserve a model call");
                Err(Refusal::Retry("the server cannot write to its database".to_owned()))
            }
        }
    }

    async fn settle(&self, session: &SessionId, call: &PlannedCall, used: Used) -> Usage {
        let pricing = self.prices.of(call);
        let usage = pricing.charged(used, call.most);
        let cost = pricing.cost(usage).unwrap_or_default();
        if matches!(used, Used::AtLeast(_)) && cost > Money::ZERO {
            tracing::warn!(
                %session, model = call.model, %cost,
                "the response of a model call was not read to its end; it is charged as held"
            );
        }
        retry(|| self.store.call_end(self.lease, &call.id, usage, cost)).await;
        usage
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
