//! The verb `sync`: brings a session's checkouts up to date with their bases. The supervisor does
//! it, also when this server ends meanwhile; the event says how it ended.

use harvest_proto::{
    SessionId,
    bridge::{FaultCode, Reply, SyncRequest, SyncTarget, ToSupervisor},
    event::CheckoutSync,
};
use harvest_store::SessionRecord;

use super::{Sessions, sandbox::not_ready};
use crate::{
    bridge::BridgeError,
    checkout,
    decide::{SandboxState, State},
    error::SessionError,
};

impl Sessions {
    /// Commits the uncommitted work of each checkout, fetches, and rebases the branch onto its
    /// base. A paused session is resumed for it. Prompts wait meanwhile.
    ///
    /// # Errors
    /// When a turn is in progress, the session has no repository, or its sandbox cannot be reached.
    pub async fn sync(&self, session: &SessionId) -> Result<Vec<CheckoutSync>, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        if record.checkouts.is_empty() {
            let hint = "`harvest run -r REPOSITORY PROMPT` starts one that has";
            let what = "the session has no repository";
            return Err(SessionError::conflict("no_repository", what, hint));
        }
        let handle = self.handle(session).await?;
        let _keeps_it_running = handle.busy();
        if handle.view.borrow().turn().is_some() {
            return Err(turn_in_progress());
        }
        let bridge = self.resumed_bridge(session, &handle).await?;
        // A fresh session has learned its bases while it started.
        let record = self.shared.store.session_get(session).await?;
        let before = handle.view.borrow().syncs.ended;
        let sync = Box::new(request(&record));
        match bridge.request(|id| ToSupervisor::Sync { id, sync }).await {
            Ok(Reply::Done) => {}
            Ok(_) => return Err(BridgeError::UnexpectedReply.into()),
            Err(BridgeError::Fault(fault)) if fault.code == FaultCode::Busy => {
                return Err(turn_in_progress());
            }
            // The sync goes on; a connection that comes back brings its event.
            Err(BridgeError::Lost) => {}
            Err(error) => return Err(error.into()),
        }
        let has_ended = |state: &State| state.syncs.ended > before;
        let over = |state: &State| {
            has_ended(state) || !matches!(state.sandbox, SandboxState::Ready { .. })
        };
        let state = self.not_found_if_deleted(session, handle.wait_for(over).await).await?;
        if has_ended(&state) { Ok(state.syncs.last) } else { Err(not_ready(session)) }
    }
}

fn turn_in_progress() -> SessionError {
    SessionError::conflict(
        "turn_in_progress",
        "a turn is in progress",
        "sync after it has ended, or `harvest stop SESSION` first",
    )
}

fn request(record: &SessionRecord) -> SyncRequest {
    let target = |of| SyncTarget {
        checkout: checkout::bridge_checkout(record, of, false),
        began: of.base_commit.clone(),
    };
    SyncRequest {
        author: record.session.author.clone(),
        checkouts: record.checkouts.iter().map(target).collect(),
    }
}
