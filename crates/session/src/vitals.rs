//! How the server is: whether work can be taken, and what there is of everything. Looks; changes nothing.

use std::time::Duration;

use harvest_proto::api::SessionState;

use crate::{
    Sessions,
    error::SessionError,
    meters::Counts,
    provider::Seeds,
    wiring::{now, words},
};

/// What answers at all does so within this time.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is there, and what happened since the server started.
#[derive(Debug, Clone)]
pub struct Vitals {
    /// Sessions by state.
    pub sessions: Vec<(SessionState, u64)>,
    /// Prompts that wait for their turn.
    pub prompts_waiting: u64,
    /// Sandboxes there are; absent when the provider did not say.
    pub sandboxes: Option<u64>,
    /// What is prepared for starts; absent when the provider did not say.
    pub seeds: Option<Seeds>,
    /// What happened.
    pub counts: Counts,
}

impl Sessions {
    /// What keeps the server from taking work, in words; empty when nothing does.
    pub async fn troubles(&self) -> Vec<String> {
        let store = async {
            // Written, not only read: a full disk lets everybody read.
            let at = now().as_millis().to_string();
            in_time(self.shared.store.meta_set("asked_whether_ready", &at)).await
        };
        let provider = in_time(self.shared.provider.list());
        let (store, provider) = tokio::join!(store, provider);
        let trouble =
            |part: &str, answer: Option<String>| answer.map(|why| format!("{part}: {why}"));
        [
            trouble("the store cannot be written", store),
            trouble("the machine does not answer", provider),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// What there is of everything.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn vitals(&self) -> Result<Vitals, SessionError> {
        let store = &self.shared.store;
        let sandboxes = tokio::time::timeout(PATIENCE, self.shared.provider.list());
        let seeds = tokio::time::timeout(PATIENCE, self.shared.provider.seeds());
        let (sandboxes, seeds) = tokio::join!(sandboxes, seeds);
        Ok(Vitals {
            sessions: store.session_count().await?,
            prompts_waiting: store.prompt_waiting().await?,
            sandboxes: sandboxes
                .ok()
                .and_then(Result::ok)
                .map(|list| u64::try_from(list.len()).unwrap_or(u64::MAX)),
            seeds: seeds.ok().flatten(),
            counts: self.shared.meters.counts(),
        })
    }
}

/// Why it was not done, if it was not.
async fn in_time<T, E: std::error::Error>(
    work: impl Future<Output = Result<T, E>>,
) -> Option<String> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(words(&error)),
        Err(_) => Some(format!("no answer in {} s", PATIENCE.as_secs())),
    }
}
