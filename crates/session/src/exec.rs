//! Commands people run in a session's machine, and its diff.

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
    inside::{Running, ready_bridge},
};

impl Sessions {
    /// Runs a command in the session's machine. It is killed when the stream is dropped.
    ///
    /// # Errors
    /// When the session has no machine that is ready, or the request makes no sense.
    pub async fn exec(
        &self,
        session: &SessionId,
        mut request: ExecRequest,
    ) -> Result<BoxStream<'static, ExecLine>, SessionError> {
        if request.argv.is_empty() {
            return Err(SessionError::invalid("invalid_command", "a command has a program"));
        }
        let stdin = request
            .stdin
            .take()
            .map(|text| BASE64_STANDARD.decode(text))
            .transpose()
            .map_err(|_| SessionError::invalid("invalid_stdin", "stdin is not base64"))?;
        let inside = self.inside(session).await?;
        match inside.exec(request, stdin.is_some()).await {
            Ok((running, input)) => {
                if let (Some(bytes), Some(mut input)) = (stdin, input) {
                    // On its own: a command that never reads must not keep us from hearing what it says.
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

    /// The session's work as a diff against where it started: as it is now when its machine runs, else
    /// as it was after the last turn.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn diff(&self, session: &SessionId) -> Result<String, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let handle = self.handle(session).await?;
        // First, so that a machine that stands still is going by then.
        let _busy = handle.busy();
        if let Some(bridge) = ready_bridge(&handle).await
            && let Ok(diff) = checkout::diff(&bridge, &record.checkouts).await
        {
            return Ok(diff);
        }
        Ok(self.shared.store.session_diff(session).await?.unwrap_or_default())
    }
}

fn lines(running: Running) -> BoxStream<'static, ExecLine> {
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
            Some(ExecOutput::End) | None => Some((lost(), None)),
        }
    })
    .boxed()
}

/// What is said when nobody knows how a command ended.
pub(crate) fn lost() -> ExecLine {
    let message = "the connection to the sandbox was lost; the command may go on".to_owned();
    ExecLine::Failed { code: "lost".to_owned(), message }
}
