//! The gateway's books, kept in the store: secrets, what a session may still use, what passed the door.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use harvest_gateway::{
    ledger::{Ledger, Refusal},
    vault::Vault,
};
use harvest_proto::{EventBody, Secret, SessionId, event::Usage};
use harvest_store::{Lease, Store, StoreError, Write};

use crate::wiring::now;

const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// The ledger of one server.
#[derive(Debug, Clone)]
pub struct Books {
    store: Store,
    lease: Lease,
    vault: Arc<Vault>,
    budget_tokens: Option<u64>,
    environment: Arc<BTreeMap<String, Secret<String>>>,
}

impl Books {
    /// Books kept in `store`, under the server's `lease`.
    #[must_use]
    pub fn new(store: Store, lease: Lease, vault: Arc<Vault>, budget_tokens: Option<u64>) -> Self {
        Self { store, lease, vault, budget_tokens, environment: Arc::default() }
    }

    /// Secrets the server was started with: used where the vault has none of that name, never stored.
    #[must_use]
    pub fn with_environment(self, secrets: BTreeMap<String, Secret<String>>) -> Self {
        Self { environment: Arc::new(secrets), ..self }
    }

    async fn kept(&self, name: &str) -> Option<Secret<String>> {
        let parsed = name.parse().ok()?;
        let sealed = self.store.secret_get(name).await.ok()??;
        self.vault.unseal(&parsed, &sealed).ok()
    }

    async fn write(&self, session: &SessionId, writes: Vec<Write>) {
        let (store, lease, session) = (self.store.clone(), self.lease, session.clone());
        // What has passed cannot be taken back: it is written even when whoever waits at the door goes away.
        let _written =
            tokio::spawn(async move { written(&store, lease, &session, writes).await }).await;
    }
}

/// Writes it down, on a full disk as soon as there is room.
async fn written(store: &Store, lease: Lease, session: &SessionId, writes: Vec<Write>) {
    let mut wait = FIRST_WAIT;
    loop {
        match store.session_commit(session, lease, now(), writes.clone()).await {
            // Builds pass the door too, and have no session.
            Ok(_) | Err(StoreError::NotFound { .. }) => return,
            Err(
                error @ (StoreError::LeaseLost | StoreError::Closed | StoreError::Unknown { .. }),
            ) => {
                return tracing::error!(%session, %error, "what passed the door could not be stored");
            }
            Err(error) => {
                tracing::error!(%session, %error, "what passed the door cannot be stored; trying again");
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

#[async_trait]
impl Ledger for Books {
    async fn secret(&self, name: &str) -> Option<Secret<String>> {
        self.kept(name).await.or_else(|| self.environment.get(name).cloned())
    }

    async fn reserve(&self, session: &SessionId) -> Result<(), Refusal> {
        let Some(budget) = self.budget_tokens else { return Ok(()) };
        let record = match self.store.session_get(session).await {
            Ok(record) => record,
            Err(StoreError::NotFound { .. }) => return Ok(()),
            Err(_) => return Err(Refusal { reason: "the budget cannot be looked up".to_owned() }),
        };
        let usage = record.session.usage;
        let used = usage.input_tokens
            + usage.output_tokens
            + usage.cache_read_tokens
            + usage.cache_write_tokens;
        if used < budget {
            return Ok(());
        }
        Err(Refusal { reason: format!("the session has used {used} of its {budget} tokens") })
    }

    async fn settle(&self, session: &SessionId, usage: Usage) {
        self.write(session, vec![Write::Usage(usage)]).await;
    }

    async fn log(&self, session: &SessionId, event: EventBody) {
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
