//! Commands that users run in a session's sandbox, and the session's diff.

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    SessionId,
    api::{ExecLine, ExecRequest},
};

use crate::{
    Sessions,
    bridge::{BridgeError, ExecOutput},
    checkout,
    error::{SessionError, fault_code},
    sandbox_handle::{CommandHandle, ready_bridge},
};

impl Sessions {
    /// Runs a command in the session's sandbox. Dropping the stream kills the command.
    ///
    /// # Errors
    /// When the session has no ready sandbox or the request is invalid.
    pub async fn exec(
        &self,
        session: &SessionId,
        mut request: ExecRequest,
    ) -> Result<BoxStream<'static, ExecLine>, SessionError> {
        if request.argv.is_empty() {
            return Err(SessionError::invalid("invalid_command", "the command is empty"));
        }
        let stdin = request
            .stdin
            .take()
            .map(|text| BASE64_STANDARD.decode(text))
            .transpose()
            .map_err(|_| SessionError::invalid("invalid_stdin", "`stdin` is not base64"))?;
        let inside = self.sandbox_handle(session).await?;
        match inside.exec(request, stdin.is_some()).await {
            Ok((running, input)) => {
                if let (Some(bytes), Some(mut input)) = (stdin, input) {
                    // In its own task: a command that never reads must not block its output.
                    tokio::spawn(async move {
                        if input.write(&bytes).await {
                            input.end();
                        }
                    });
                }
                Ok(lines(running))
            }
            Err(SessionError::Bridge(BridgeError::Fault(fault))) => {
                let code = fault_code(&fault).to_owned();
                Ok(stream::iter([ExecLine::Failed { code, message: fault.message }]).boxed())
            }
            Err(error) => Err(error),
        }
    }

    /// The diff from the session's base commit to the current checkout when the sandbox runs,
    /// otherwise to the end of the last turn.
    ///
    /// # Errors
    /// When the session does not exist.
    pub async fn diff(&self, session: &SessionId) -> Result<String, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let handle = self.handle(session).await?;
        // Marked busy first, so that a frozen sandbox is thawed by the time it is used.
        let _busy = handle.busy();
        if let Some(bridge) = ready_bridge(&handle).await
            && let Ok(diff) = checkout::diff(&bridge, &record.checkouts).await
        {
            return Ok(diff);
        }
        Ok(self.shared.store.session_diff(session).await?.unwrap_or_default())
    }
}

fn lines(running: CommandHandle) -> BoxStream<'static, ExecLine> {
    stream::unfold(Some(running), |running| async move {
        let mut running = running?;
        let encode = |bytes: Vec<u8>| BASE64_STANDARD.encode(bytes);
        match running.next().await {
            Some(ExecOutput::Stdout { bytes, .. }) => {
                Some((ExecLine::Stdout { data: encode(bytes) }, Some(running)))
            }
            Some(ExecOutput::Stderr { bytes, .. }) => {
                Some((ExecLine::Stderr { data: encode(bytes) }, Some(running)))
            }
            Some(ExecOutput::Exited { exit, millis }) => {
                Some((ExecLine::Exited { exit, millis, reason: None }, None))
            }
            Some(ExecOutput::End) | None => Some((connection_lost(), None)),
        }
    })
    .boxed()
}

/// The last line when the outcome of a command is unknown.
pub(crate) fn connection_lost() -> ExecLine {
    let message =
        "the connection to the sandbox was lost; the command may still be running".to_owned();
    ExecLine::Failed { code: "lost".to_owned(), message }
}
