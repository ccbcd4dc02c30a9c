//! Idempotency keys. The key of a request is written in the transaction that creates its session or
//! prompt, so a server that dies before it answers has still created it exactly once.

use std::sync::Arc;

use harvest_proto::{
    PromptId, SessionId,
    api::{Prompt, Session},
};
use harvest_store::{Claim, Write};

use super::Sessions;
use crate::{error::SessionError, hex::hex, wall_clock::now};

/// The objects created by an earlier request whose response was never stored.
#[derive(Debug, Clone, PartialEq)]
pub enum CreatedUnderKey {
    Prompt(Box<Prompt>),
    Sessions(Vec<Session>),
}

impl Sessions {
    /// Returns a handle that stores this key, which must be claimed, with everything it creates.
    #[must_use]
    pub fn with_idempotency_key(&self, key: Option<&str>) -> Self {
        let mut sessions = self.clone();
        sessions.key = key.map(Arc::from);
        sessions
    }

    /// The write that records `id` as created under the current key.
    pub(super) fn created_write(&self, id: &str) -> Option<Write> {
        self.key.as_deref().map(|key| Write::CreatedId { key: key.to_owned(), id: id.to_owned() })
    }

    /// Claims a key for a request, identified by a keyed hash of its content, which may contain
    /// secrets. Keys are kept for 24 hours.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_claim(
        &self,
        key: &str,
        request: &[u8],
    ) -> Result<Claim, SessionError> {
        let request = hex(&self.shared.vault.fingerprint(request));
        Ok(self.shared.store.idempotency_claim(key, &request, now()).await?)
    }

    /// Stores the response of a claimed key.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_finish(&self, key: &str, response: &str) -> Result<(), SessionError> {
        Ok(self.shared.store.idempotency_finish(key, response).await?)
    }

    /// Releases a claimed key whose request failed, unless something was created under it.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_release(&self, key: &str) -> Result<(), SessionError> {
        Ok(self.shared.store.idempotency_release(key).await?)
    }

    /// The current state of what was created under a key. `session` is the session of a prompt.
    ///
    /// # Errors
    /// When the object has been deleted since.
    pub async fn created_under_key(
        &self,
        session: Option<&SessionId>,
        ids: &[String],
    ) -> Result<CreatedUnderKey, SessionError> {
        if let (Some(session), [id]) = (session, ids)
            && let Ok(prompt) = id.parse::<PromptId>()
        {
            return Ok(CreatedUnderKey::Prompt(Box::new(
                self.shared.store.prompt_get(session, &prompt).await?,
            )));
        }
        let mut sessions = Vec::new();
        for id in ids {
            let id = id.parse().map_err(|_| SessionError::missing(format!("session {id}")))?;
            sessions.push(self.get(&id).await?);
        }
        Ok(CreatedUnderKey::Sessions(sessions))
    }
}
