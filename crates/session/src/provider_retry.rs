//! Calls of the provider that must succeed.

use std::time::Duration;

use crate::{error_chain::error_chain, sandboxes::SandboxError};

/// Retries without limit: the caller cannot continue without the answer.
pub(crate) async fn retry<T, F>(mut call: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, SandboxError>>,
{
    let mut wait = Duration::from_millis(50);
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "the provider failed; retrying")
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_secs(10));
    }
}
