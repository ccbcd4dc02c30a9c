//! The tools that a session's agent calls at the tools door of the gateway. One file per topic;
//! each tool has a definition, which agents read, and an operation.

mod artifacts;
pub(crate) mod definition;
mod memory;
mod run_tests;
mod session;
pub(crate) use session::within as text_within;

use std::sync::Arc;

use async_trait::async_trait;
use harvest_gateway::ledger::{ForgeAnswer, ForgeCall, ToolResult, Tools};
use harvest_proto::SessionId;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tracing::Instrument as _;

use crate::{
    context::Shared,
    error::SessionError,
    error_chain::error_chain,
    forge_api::{self, CommentCount},
    tool_host::ToolHost,
    tools::definition::Definition,
};

/// The tools of one session, in one sandbox.
#[derive(Clone)]
pub(crate) struct SessionTools {
    pub(crate) session: SessionId,
    pub(crate) shared: Arc<Shared>,
    /// Those made with `gh`.
    pub(crate) comments: CommentCount,
}

/// The tools of every session, as MCP describes them.
pub(crate) fn definitions() -> Vec<Value> {
    let own = session::DEFINITIONS.iter().chain([&run_tests::DEFINITION, &artifacts::DEFINITION]);
    let all = own.chain(&memory::DEFINITIONS);
    all.map(Definition::to_json).collect()
}

#[async_trait]
impl Tools for SessionTools {
    fn list(&self) -> Vec<Value> {
        definitions()
    }

    async fn call(&self, name: &str, arguments: Value) -> Option<ToolResult> {
        let result = match session::call(self, name, &arguments).await {
            Some(result) => result,
            None if name == run_tests::DEFINITION.name => run_tests::call(self, arguments).await,
            None if name == artifacts::DEFINITION.name => artifacts::call(self, arguments).await,
            None => memory::call(self, name, arguments).await?,
        };
        Some(result.unwrap_or_else(|error| failure(&error)))
    }

    async fn forge(&self, call: ForgeCall) -> ForgeAnswer {
        forge_api::answer(self, call).await
    }
}

impl SessionTools {
    pub(crate) fn new(session: SessionId, shared: Arc<Shared>) -> Self {
        Self { session, shared, comments: CommentCount::default() }
    }

    /// Refuses what stores an event when the session's history is full.
    pub(crate) async fn check_history(&self) -> Result<(), ToolError> {
        let stored = self.shared.store.session_history_bytes(&self.session).await?;
        if stored >= Some(self.shared.retention.rules.history.per_session) {
            let why =
                "the history of this session is full; the pull request is opened after your turn";
            return Err(ToolError::Refused(why.to_owned()));
        }
        Ok(())
    }

    /// The sessions, unless the server shuts down.
    fn host(&self) -> Result<Arc<dyn ToolHost>, ToolError> {
        let host = self.shared.tool_host.get().and_then(|find| find());
        host.ok_or(ToolError::Session(SessionError::Stopped))
    }

    /// Runs a change to completion, even when the agent's connection ends meanwhile: a cancelled
    /// one could leave a session without a driver, or a pull request that is not recorded.
    pub(crate) async fn detach<T: Send + 'static, E: Into<ToolError> + Send + 'static>(
        &self,
        change: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, ToolError> {
        let done = self.shared.tasks.spawn_to_completion(change.in_current_span()).await;
        let panicked = |_| Err(ToolError::Refused("the tool panicked; see the log".to_owned()));
        done.map_or_else(panicked, |done| done.map_err(Into::into))
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    #[error("invalid arguments: {0}")]
    Arguments(#[from] serde_json::Error),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("{0}")]
    Refused(String),
}

impl From<harvest_store::StoreError> for ToolError {
    fn from(error: harvest_store::StoreError) -> Self {
        Self::Session(error.into())
    }
}

/// The arguments of a tool. Unknown ones are ignored, as by the stock servers.
fn arguments<T: DeserializeOwned>(arguments: Value) -> Result<T, ToolError> {
    Ok(serde_json::from_value(arguments)?)
}

/// The failure for the agent. Hints name commands that exist outside the sandbox only.
fn failure(error: &ToolError) -> ToolResult {
    ToolResult { text: error_chain(error), structured: None, failed: true }
}

/// A result whose text is a value as JSON.
fn document(text: &impl Serialize, structured: Value) -> ToolResult {
    let text = serde_json::to_string_pretty(text).expect("all keys are strings");
    ToolResult { text, structured: Some(structured), failed: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_name_no_commands_of_the_user() {
        let refused =
            SessionError::conflict("stopped", "it is stopped", "`harvest resume SESSION`");
        for (error, text) in [
            (SessionError::missing("repository `a/b`"), "there is no repository `a/b`"),
            (refused, "it is stopped"),
        ] {
            let result = failure(&error.into());
            assert_eq!((result.text.as_str(), result.failed), (text, true));
        }
    }
}
