//! Commands people run in a session's machine, and its diff.

use std::time::Duration;

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    SessionId,
    api::{ExecLine, ExecRequest},
    bridge::{Command, Fault, FaultCode},
};

use crate::{
    Sessions,
    bridge::{Bridge, BridgeError, Exec, ExecOutput},
    checkout,
    decide::{Link, Machine, State},
    driver::{Busy, Handle},
    error::SessionError,
};

// Dialling takes milliseconds; who waits for longer is better told.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);

impl Sessions {
    /// Runs a command in the session's machine. It is killed when the stream is dropped.
    ///
    /// # Errors
    /// When the session has no machine that is ready, or the request makes no sense.
    pub async fn exec(
        &self,
        session: &SessionId,
        request: ExecRequest,
    ) -> Result<BoxStream<'static, ExecLine>, SessionError> {
        if request.argv.is_empty() {
            return Err(SessionError::invalid("invalid_command", "a command has a program"));
        }
        let stdin = request
            .stdin
            .map(|text| BASE64_STANDARD.decode(text))
            .transpose()
            .map_err(|_| SessionError::invalid("invalid_stdin", "stdin is not base64"))?;
        let record = self.shared.store.session_get(session).await?;
        let (handle, bridge) = self.machine(session).await?;
        let limit = u64::try_from(self.shared.config.clocks.exec.as_millis()).unwrap_or(u64::MAX);
        let command = Command {
            argv: request.argv,
            env: request.env,
            cwd: Some(request.cwd.unwrap_or_else(|| checkout::folder(&record.session.repository))),
            user: Some(request.user.unwrap_or_else(|| "harvest".to_owned())),
            timeout_millis: Some(request.timeout_millis.unwrap_or(limit)),
            ..Command::default()
        };
        let busy = handle.busy();
        match bridge.exec(command, stdin).await {
            Ok(exec) => Ok(lines(exec, busy)),
            Err(BridgeError::Fault(fault)) => Ok(stream::iter([refused(&fault)]).boxed()),
            Err(error) => Err(error.into()),
        }
    }

    async fn machine(&self, session: &SessionId) -> Result<(Handle, Bridge), SessionError> {
        let handle = self.handle(session).await?;
        let bridge = ready_bridge(&handle).await.ok_or_else(|| {
            SessionError::conflict(
                "not_ready",
                format!("session {session} has no machine that is ready"),
                "resume it and wait until it is idle",
            )
        })?;
        Ok((handle, bridge))
    }

    /// The session's work as a diff against where it started: as it is now when its machine runs, else
    /// as it was after the last turn.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn diff(&self, session: &SessionId) -> Result<String, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        if let Some(bridge) = ready_bridge(&self.handle(session).await?).await
            && let Ok(diff) = checkout::diff(&bridge, &record.checkouts).await
        {
            return Ok(diff);
        }
        Ok(self.shared.store.session_diff(session).await?.unwrap_or_default())
    }
}

/// A machine that is ready but not spoken with, after a restart of the server say, is dialled this moment.
async fn ready_bridge(handle: &Handle) -> Option<Bridge> {
    if let Some(bridge) = handle.bridge().await {
        return Some(bridge);
    }
    let dialling = |state: &State| matches!(state.machine, Machine::Ready { link: Link::Down { .. }, .. });
    let spoken_with = handle.until(|state| !dialling(state));
    let _ = tokio::time::timeout(DIAL_PATIENCE, spoken_with).await;
    handle.bridge().await
}

fn refused(fault: &Fault) -> ExecLine {
    let code = match fault.code {
        FaultCode::NotFound => "not_found",
        FaultCode::Denied => "denied",
        FaultCode::NotExecutable => "not_executable",
        FaultCode::Busy => "busy",
        FaultCode::NotReady => "not_ready",
        FaultCode::NotOwner => "not_owner",
        FaultCode::Invalid => "invalid",
        FaultCode::System => "system",
    };
    ExecLine::Failed { code: code.to_owned(), message: fault.message.clone() }
}

fn lines(exec: Exec, busy: Busy) -> BoxStream<'static, ExecLine> {
    stream::unfold(Some((exec, busy)), |running| async move {
        let (mut exec, busy) = running?;
        let encode = |bytes: Vec<u8>| BASE64_STANDARD.encode(bytes);
        match exec.next().await {
            Some(ExecOutput::Stdout { bytes, .. }) => {
                Some((ExecLine::Stdout { data: encode(bytes) }, Some((exec, busy))))
            }
            Some(ExecOutput::Stderr { bytes, .. }) => {
                Some((ExecLine::Stderr { data: encode(bytes) }, Some((exec, busy))))
            }
            Some(ExecOutput::Exited { exit, millis }) => Some((ExecLine::Exited { exit, millis }, None)),
            Some(ExecOutput::End) | None => {
                let message = "the connection to the sandbox was lost; the command may go on".to_owned();
                Some((ExecLine::Failed { code: "lost".to_owned(), message }, None))
            }
        }
    })
    .boxed()
}
