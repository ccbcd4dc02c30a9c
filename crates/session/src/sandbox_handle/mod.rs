//! Commands, terminals and files in a sandbox, over its bridge. The same for sessions and
//! standalone sandboxes; of sessions this module only knows how to reach their sandbox.

mod commands;
mod files;

use std::{any::Any, time::Duration};

use harvest_proto::{SessionId, bridge::Command};

use crate::{
    Sessions,
    bridge::Bridge,
    checkout,
    decide::{Input, LinkState, Mode, SandboxState, State},
    driver::DriverHandle,
    error::SessionError,
};

pub use commands::{CommandHandle, TerminalRequest};
pub use files::{FileDownload, PathContent};

// Long enough for a sandbox to start from its snapshot and run its hooks.
const START_TIMEOUT: Duration = Duration::from_secs(300);

// Dialling usually takes milliseconds.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The default user of commands and owner of files.
const DEFAULT_USER: &str = "harvest";

/// Keeps a sandbox from becoming idle until it is dropped.
pub type UseGuard = Box<dyn Any + Send + Sync>;

/// A sandbox in use. It does not become idle while this, or anything made from it, lives.
pub struct SandboxHandle {
    bridge: Bridge,
    /// The default working folder of commands.
    folder: String,
    /// The default timeout of commands.
    timeout: Duration,
    use_guard: UseGuard,
    /// Folder and user of commands default to the image's.
    image_defaults: bool,
}

impl SandboxHandle {
    /// The sandbox behind a bridge, with the default folder and timeout of its commands.
    #[must_use]
    pub fn new(bridge: Bridge, folder: String, timeout: Duration, use_guard: UseGuard) -> Self {
        Self { bridge, folder, timeout, use_guard, image_defaults: false }
    }

    /// Commands run in the image's folder and as its user by default.
    #[must_use]
    pub fn with_image_defaults(self) -> Self {
        Self { image_defaults: true, ..self }
    }

    fn command(&self, argv: Vec<String>, cwd: Option<String>, user: Option<String>) -> Command {
        let (cwd, user) = match self.image_defaults {
            true => (cwd, user),
            false => (
                cwd.or_else(|| Some(self.folder.clone())),
                user.or_else(|| Some(DEFAULT_USER.to_owned())),
            ),
        };
        Command { argv, cwd, user, ..Command::default() }
    }
}

impl Sessions {
    /// The sandbox of a session. A paused session is resumed for it.
    ///
    /// # Errors
    /// When there is no such session, or it has no sandbox and cannot start one.
    pub async fn sandbox_handle(&self, session: &SessionId) -> Result<SandboxHandle, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let handle = self.handle(session).await?;
        let busy = handle.busy();
        let bridge = match ready_bridge(&handle).await {
            Some(bridge) => bridge,
            None => {
                let resumed = self.resume_and_wait(&handle).await;
                self.not_found_if_deleted(session, resumed).await?;
                ready_bridge(&handle).await.ok_or_else(|| not_ready(session))?
            }
        };
        let folder = checkout::folder(&record.session.repository);
        Ok(SandboxHandle::new(bridge, folder, self.shared.config.timeouts.exec, Box::new(busy)))
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

fn not_ready(session: &SessionId) -> SessionError {
    SessionError::conflict(
        "not_ready",
        format!("session {session} has no running sandbox, and none could be started"),
        "`harvest show` says why; `harvest resume` starts it again",
    )
}

/// The bridge of a ready sandbox. Waits for a sandbox that is being dialled, as after a restart of
/// the server, or thawed.
pub(crate) async fn ready_bridge(handle: &DriverHandle) -> Option<Bridge> {
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
