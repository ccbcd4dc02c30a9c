//! The inside of a machine, for whoever may look: commands, terminals and files over its bridge. Knows
//! nothing of sessions but how to get at the machine of one, so that a machine without a session can be
//! used the same way.

mod commands;
mod files;

use std::{any::Any, time::Duration};

use harvest_proto::{SessionId, bridge::Command};

use crate::{
    Sessions,
    bridge::Bridge,
    checkout,
    decide::{Input, Link, Machine, Rest, State},
    driver::Handle,
    error::SessionError,
};

pub use commands::{Running, TerminalOrder};
pub use files::{Content, Download};

// Long enough for a machine to start from its snapshot and run its hooks; who waits for longer is better told.
const MACHINE_PATIENCE: Duration = Duration::from_secs(300);

// Dialling takes milliseconds.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);

/// Who commands run as and files belong to, unless somebody says otherwise.
const USER: &str = "harvest";

/// Held for as long as a machine is used.
pub type InUse = Box<dyn Any + Send + Sync>;

/// A machine in use. It does not go idle while this, or anything made from it, lives.
pub struct Inside {
    bridge: Bridge,
    /// Where commands run.
    folder: String,
    /// How long commands may run.
    limit: Duration,
    in_use: InUse,
    /// Commands run where, and as whom, the image says.
    as_imaged: bool,
}

impl Inside {
    /// The machine behind a bridge. Commands run in `folder` for at most `limit`; `in_use` is held for as
    /// long as it is used.
    #[must_use]
    pub fn new(bridge: Bridge, folder: String, limit: Duration, in_use: InUse) -> Self {
        Self { bridge, folder, limit, in_use, as_imaged: false }
    }

    /// The same; commands that do not say otherwise run where, and as whom, the image says.
    #[must_use]
    pub fn as_imaged(self) -> Self {
        Self { as_imaged: true, ..self }
    }

    fn command(&self, argv: Vec<String>, cwd: Option<String>, user: Option<String>) -> Command {
        let (cwd, user) = match self.as_imaged {
            true => (cwd, user),
            false => {
                (cwd.or_else(|| Some(self.folder.clone())), user.or_else(|| Some(USER.to_owned())))
            }
        };
        Command { argv, cwd, user, ..Command::default() }
    }
}

impl Sessions {
    /// A session's machine. One that rests is started for this, as a prompt would start it.
    ///
    /// # Errors
    /// When there is no such session, or it has no machine and cannot get one.
    pub async fn inside(&self, session: &SessionId) -> Result<Inside, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let handle = self.handle(session).await?;
        let busy = handle.busy();
        let bridge = match ready_bridge(&handle).await {
            Some(bridge) => bridge,
            None => {
                let woken = self.wake(&handle).await;
                self.or_missing(session, woken).await?;
                ready_bridge(&handle).await.ok_or_else(|| not_ready(session))?
            }
        };
        let folder = checkout::folder(&record.session.repository);
        Ok(Inside::new(bridge, folder, self.shared.config.clocks.exec, Box::new(busy)))
    }

    /// Sets a resting session going and waits until it takes commands or cannot.
    async fn wake(&self, handle: &Handle) -> Result<(), SessionError> {
        let state = handle.view.borrow().clone();
        if may_wake(&state) {
            handle.ask(Input::Resume).await?;
        }
        let settled = handle.until(|state| spoken_with(state) || is_stuck(state));
        match tokio::time::timeout(MACHINE_PATIENCE, settled).await {
            Ok(settled) => settled.map(drop),
            Err(_not_in_time) => Ok(()),
        }
    }
}

/// A session that was put away or has failed waits for a person's word.
fn may_wake(state: &State) -> bool {
    matches!(state.rest, Rest::Paused { .. })
        || (state.rest == Rest::Open && !state.wake && matches!(state.machine, Machine::Absent))
}

/// Nothing starts any more: it failed, or somebody has had it rest meanwhile.
fn is_stuck(state: &State) -> bool {
    state.rest != Rest::Open || matches!(state.machine, Machine::Held { .. })
}

fn spoken_with(state: &State) -> bool {
    matches!(state.machine, Machine::Ready { link: Link::Up, .. }) && state.is_awake()
}

fn not_ready(session: &SessionId) -> SessionError {
    SessionError::conflict(
        "not_ready",
        format!(
            "session {session} has no machine that is ready, and none could be started for this"
        ),
        "`harvest show` says why; `harvest resume` starts it again",
    )
}

/// A machine that is ready but not spoken with, after a restart of the server say, is dialled this moment;
/// one that stands still is going again in a moment.
pub(crate) async fn ready_bridge(handle: &Handle) -> Option<Bridge> {
    if let Some(bridge) = handle.bridge().await {
        return Some(bridge);
    }
    let soon = |state: &State| match &state.machine {
        Machine::Ready { link, .. } => *link != Link::Up || !state.is_awake(),
        _ => false,
    };
    let spoken_with = handle.until(|state| !soon(state));
    let _ = tokio::time::timeout(DIAL_PATIENCE, spoken_with).await;
    handle.bridge().await
}
