//! Server readiness and statistics. Read-only, except for a readiness probe that writes to the
//! store.

use std::time::Duration;

use harvest_proto::api::SessionState;

use harvest_proto::api::SandboxOwner;

use super::Sessions;
use crate::{
    error::SessionError, error_chain::error_chain, metrics::MetricCounts, pool::PoolCounts,
    sandboxes::StandbyCounts, wall_clock::now,
};

const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Current numbers, and counts since the server started.
#[derive(Debug, Clone)]
pub struct ServerStats {
    pub sessions: Vec<(SessionState, u64)>,
    pub prompts_waiting: u64,
    /// `None` when the provider did not answer.
    pub sandboxes: Option<u64>,
    /// `None` when the provider did not answer.
    pub standby: Option<StandbyCounts>,
    pub pool: PoolCounts,
    pub counts: MetricCounts,
}

impl Sessions {
    /// The reasons why the server cannot accept work; empty when it is ready.
    pub async fn readiness_problems(&self) -> Vec<String> {
        let store = async {
            // A write, because reads still work on a full disk.
            let at = now().as_millis().to_string();
            describe_failure(self.shared.store.meta_set("readiness_probe", &at)).await
        };
        let provider = describe_failure(self.shared.sandboxes.provider.list());
        let (store, provider) = tokio::join!(store, provider);
        let problem = |part: &str, error: Option<String>| error.map(|why| format!("{part}: {why}"));
        [
            problem("cannot write to the store", store),
            problem("the sandbox provider fails", provider),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// # Errors
    /// When the store fails.
    pub async fn stats(&self) -> Result<ServerStats, SessionError> {
        let store = &self.shared.store;
        let sandboxes = tokio::time::timeout(PROBE_TIMEOUT, self.shared.sandboxes.provider.list());
        let standby = async {
            let host = self.shared.sandboxes.provider.host()?;
            tokio::time::timeout(PROBE_TIMEOUT, host.standby()).await.ok().flatten()
        };
        let (sandboxes, standby) = tokio::join!(sandboxes, standby);
        Ok(ServerStats {
            sessions: store.session_count().await?,
            prompts_waiting: store.prompt_queued_count().await?,
            sandboxes: sandboxes.ok().and_then(Result::ok).map(|list| {
                list.iter().filter(|listed| listed.owner == SandboxOwner::Session).count() as u64
            }),
            standby,
            pool: self.shared.pool.counts(),
            counts: self.metrics.counts(),
        })
    }
}

/// Why `work` failed or timed out; `None` on success.
async fn describe_failure<T, E: std::error::Error>(
    work: impl Future<Output = Result<T, E>>,
) -> Option<String> {
    match tokio::time::timeout(PROBE_TIMEOUT, work).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error_chain(&error)),
        Err(_) => Some(format!("no answer within {} s", PROBE_TIMEOUT.as_secs())),
    }
}
