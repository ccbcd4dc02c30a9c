//! The keys by which a request is told from its repetition. What a session or a prompt was asked for with is
//! written in the transaction that makes it: a server that dies before it has answered has made it once.

use std::sync::Arc;

use harvest_proto::{
    PromptId, SessionId,
    api::{Prompt, Session},
};
use harvest_store::{Claim, Write};
use ring::digest::{SHA256, digest};

use crate::{Sessions, error::SessionError, secrets::hex, wiring::now};

/// What a request made that was answered to nobody.
#[derive(Debug, Clone, PartialEq)]
pub enum Made {
    /// A prompt.
    Prompt(Box<Prompt>),
    /// Sessions.
    Sessions(Vec<Session>),
}

impl Sessions {
    /// The same sessions; what is made through them is made under this key, which was claimed before.
    #[must_use]
    pub fn under(&self, key: Option<&str>) -> Self {
        let mut sessions = self.clone();
        sessions.key = key.map(Arc::from);
        sessions
    }

    /// That this was made, for the key it is made under.
    pub(crate) fn made(&self, id: &str) -> Option<Write> {
        self.key.as_deref().map(|key| Write::Made { key: key.to_owned(), id: id.to_owned() })
    }

    /// Claims an idempotency key for a request, told apart by what it says. Keys are kept for 24 hours.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_claim(
        &self,
        key: &str,
        request: &[u8],
    ) -> Result<Claim, SessionError> {
        let request = hex(digest(&SHA256, request).as_ref());
        Ok(self.shared.store.idempotency_claim(key, &request, now()).await?)
    }

    /// The work of a claimed key is done; this was the answer.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_finish(&self, key: &str, answer: &str) -> Result<(), SessionError> {
        Ok(self.shared.store.idempotency_finish(key, answer).await?)
    }

    /// The work of a claimed key was not done; it may be claimed again. What it made all the same stays made.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_release(&self, key: &str) -> Result<(), SessionError> {
        Ok(self.shared.store.idempotency_release(key).await?)
    }

    /// What a key's request made, as it stands now. `session` is whose prompt it would be.
    ///
    /// # Errors
    /// When it has been deleted since.
    pub async fn made_under_key(
        &self,
        session: Option<&SessionId>,
        ids: &[String],
    ) -> Result<Made, SessionError> {
        if let (Some(session), [id]) = (session, ids)
            && let Ok(prompt) = id.parse::<PromptId>()
        {
            return Ok(Made::Prompt(Box::new(
                self.shared.store.prompt_get(session, &prompt).await?,
            )));
        }
        let mut sessions = Vec::new();
        for id in ids {
            let id = id.parse().map_err(|_| SessionError::missing(format!("session {id}")))?;
            sessions.push(self.get(&id).await?);
        }
        Ok(Made::Sessions(sessions))
    }
}
