//! Reaches a session's sandbox for commands, terminals and files. A paused session is resumed.

use std::time::Duration;

use harvest_proto::SessionId;

use super::Sessions;
use crate::{
    bridge::Bridge,
    checkout,
    decide::{Input, LinkState, Mode, SandboxState, State},
    driver::DriverHandle,
    error::SessionError,
    sandboxes::{CommandDefaults, SandboxHandle},
};

// Long enough for a sandbox to start from its snapshot and run its hooks.
const START_TIMEOUT: Duration = Duration::from_secs(300);

// Dialling usually takes milliseconds.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The default user of commands and owner of files.
const AGENT_USER: &str = "harvest";

impl Sessions {
    /// The sandbox of a session. A paused session is resumed for it.
    ///
    /// # Errors
    /// When there is no such session, or it has no sandbox and cannot start one.
    pub async fn sandbox_handle(&self, session: &SessionId) -> Result<SandboxHandle, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let handle = self.handle(session).await?;
        let busy = handle.busy();
        let bridge = self.resumed_bridge(session, &handle).await?;
        let sandbox = handle.view.borrow().sandbox_id().cloned();
        let sandbox = sandbox.ok_or_else(|| not_ready(session))?;
        let defaults = CommandDefaults {
            folder: Some(record.work_folder()),
            user: Some(AGENT_USER.to_owned()),
            file_user: AGENT_USER,
            timeout: self.shared.timeouts.exec,
        };
        Ok(self.shared.sandboxes.service.handle(sandbox, bridge, defaults, Box::new(busy)))
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

    /// The bridge of a session's sandbox. A paused session is resumed for it.
    pub(super) async fn resumed_bridge(
        &self,
        session: &SessionId,
        handle: &DriverHandle,
    ) -> Result<Bridge, SessionError> {
        if let Some(bridge) = ready_bridge(handle).await {
            return Ok(bridge);
        }
        let resumed = self.resume_and_wait(handle).await;
        self.not_found_if_deleted(session, resumed).await?;
        ready_bridge(handle).await.ok_or_else(|| not_ready(session))
    }

    /// Resumes a paused session and waits until its sandbox accepts commands or cannot start.
    async fn resume_and_wait(&self, handle: &DriverHandle) -> Result<(), SessionError> {
        let state = handle.view.borrow().clone();
        if may_resume(&state) {
            handle.apply(Input::Resume).await?;
        }
        let settled = handle.wait_for(|state| is_reachable(state) || is_stuck(state));
        match tokio::time::timeout(START_TIMEOUT, settled).await {
            Ok(settled) => settled.map(drop),
            Err(_timeout) => Ok(()),
        }
    }
}

/// An archived or failed session is not resumed without a request of its user.
fn may_resume(state: &State) -> bool {
    matches!(state.mode, Mode::Paused { .. })
        || (state.mode == Mode::Active
            && !state.start_requested
            && matches!(state.sandbox, SandboxState::Absent))
}

/// The start failed, or the session was paused meanwhile.
fn is_stuck(state: &State) -> bool {
    state.mode != Mode::Active || matches!(state.sandbox, SandboxState::SaveUnknown { .. })
}

fn is_reachable(state: &State) -> bool {
    matches!(state.sandbox, SandboxState::Ready { link: LinkState::Up, .. }) && state.accepts_work()
}

pub(super) fn not_ready(session: &SessionId) -> SessionError {
    SessionError::conflict(
        "not_ready",
        format!("session {session} has no running sandbox, and none could be started"),
        "`harvest show SESSION` says why; `harvest resume SESSION` starts it again",
    )
}

/// The bridge of a ready sandbox. Waits for a sandbox that is being dialled, as after a restart of
/// the server, or thawed.
pub(super) async fn ready_bridge(handle: &DriverHandle) -> Option<Bridge> {
    if let Some(bridge) = handle.bridge().await {
        return Some(bridge);
    }
    let soon = |state: &State| match &state.sandbox {
        SandboxState::Ready { link, .. } => *link != LinkState::Up || !state.accepts_work(),
        _ => false,
    };
    let settled = handle.wait_for(|state| !soon(state));
    let _ = tokio::time::timeout(DIAL_TIMEOUT, settled).await;
    handle.bridge().await
}
