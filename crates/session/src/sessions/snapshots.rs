//! Snapshots of sessions: listed, taken while a session goes on, and restored.
//!
//! A snapshot that a user asks for gets its row after it was captured. Until then it is in
//! `Shared::pending_snapshots`, so that the comparison of snapshots after a start leaves it alone;
//! one whose server died in between is an orphan, which the next start removes.

use std::time::Duration;

use harvest_proto::{
    EventBody, SandboxId, SessionId, SnapshotId,
    api::{CreateSnapshot, Snapshot},
    event::SnapshotKind,
};
use harvest_store::Write;

use super::{
    Sessions,
    sandbox::{not_ready, ready_bridge},
    verbs::save_unknown,
};
use crate::{
    decide::{Input, SandboxState, State},
    driver::{DriverHandle, event},
    error::SessionError,
    error_chain::error_chain,
    sandboxes::{Durability, SandboxError},
    wall_clock::now,
};

// Long enough for a sandbox to boot.
const START_TIMEOUT: Duration = Duration::from_secs(300);

const MAX_NAME_CHARS: usize = 100;

// Named snapshots are pinned, so no retention rule limits them.
const MAX_PINNED: usize = 100;

// Retention removes the others, but only every few minutes; at this number it runs at once.
const MAX_REQUESTED: usize = 200;

/// What a session is restored to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestorePoint {
    /// The end of a turn; 0 is the start.
    Turn(u32),
    Snapshot(SnapshotId),
}

impl Sessions {
    /// A session's snapshots, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn snapshots(&self, session: &SessionId) -> Result<Vec<Snapshot>, SessionError> {
        let mut snapshots = self.shared.store.snapshot_list(session).await?;
        if let Some(stored) = self.shared.sandboxes.provider.snapshots() {
            for snapshot in snapshots.iter_mut().filter(|snapshot| !snapshot.gone) {
                let durability = stored.durability(&snapshot.id).await?;
                snapshot.durable = durability == Durability::Durable;
            }
        }
        self.exists_if_empty(session, snapshots).await
    }

    /// Takes a snapshot of the session's sandbox, which goes on with what it does. A session
    /// without a sandbox has its newest snapshot already. `planned` is what an earlier attempt of
    /// the same request has taken.
    ///
    /// # Errors
    /// When the session has nothing to save, or the snapshot cannot be taken.
    pub async fn snapshot_create(
        &self,
        session: &SessionId,
        create: CreateSnapshot,
        planned: &[String],
    ) -> Result<Snapshot, SessionError> {
        create.name.as_deref().map(check_name).transpose()?;
        let record = self.shared.store.session_get(session).await?;
        self.shared.check_provider(&record.session)?;
        let all = self.shared.store.snapshot_list(session).await?;
        if let Some(known) = all.iter().find(|one| planned.contains(&one.id.to_string())) {
            return self.snapshot_get(session, &known.id).await;
        }
        if create.name.is_some() && all.iter().filter(|one| one.pinned).count() >= MAX_PINNED {
            return Err(SessionError::conflict(
                "too_many_snapshots",
                format!("the session has {MAX_PINNED} pinned snapshots already"),
                "`harvest snapshot unpin SESSION@TURN` leaves one to the retention rules",
            ));
        }
        if create.name.is_none() && is_full(&all) {
            self.shared.retention.enforce_for(session).await?;
            if is_full(&self.shared.store.snapshot_list(session).await?) {
                return Err(SessionError::conflict(
                    "too_many_snapshots",
                    format!("the session has {MAX_REQUESTED} requested snapshots already"),
                    "lower the setting `retention.snapshots_per_session`, which keeps them",
                ));
            }
        }
        let handle = self.handle(session).await?;
        // A frozen sandbox is thawed.
        let _busy = handle.busy();
        let state = self.not_found_if_deleted(session, settled(&handle).await).await?;
        match disk(session, &state)? {
            Disk::Running(sandbox) => {
                ready_bridge(&handle).await.ok_or_else(|| not_ready(session))?;
                let id = SnapshotId::random();
                let _pending = self.shared.pending_snapshots.add(&id);
                let writes = self.capture(sandbox, &id).await?;
                self.record(session, id, writes, create).await
            }
            Disk::Saved(latest) => {
                let writes = self.created_write(&latest.to_string()).into_iter().collect();
                self.record(session, latest.clone(), writes, create).await
            }
        }
    }

    /// Captures the disk of a running sandbox; returns what is to be stored with it.
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<Vec<Write>, SessionError> {
        let (snapshots, at) = (self.shared.sandboxes.service.snapshots()?, now());
        let kind = SnapshotKind::Request;
        let captured = snapshots.capture(sandbox, snapshot, Some(kind)).await?;
        let millis = captured.frozen_millis;
        let body = EventBody::SnapshotTaken { snapshot_id: snapshot.clone(), kind, millis };
        let insert = Write::SnapshotInsert { snapshot: snapshot.clone(), kind, turn: None, at };
        let mut writes = vec![insert, event(at, None, body)];
        writes.extend(self.created_write(&snapshot.to_string()));
        Ok(writes)
    }

    /// Stores a snapshot with its name. One that cannot be stored is removed again.
    async fn record(
        &self,
        session: &SessionId,
        snapshot: SnapshotId,
        mut writes: Vec<Write>,
        create: CreateSnapshot,
    ) -> Result<Snapshot, SessionError> {
        let is_new = writes.iter().any(|one| matches!(one, Write::SnapshotInsert { .. }));
        let name = |name| Write::SnapshotName { snapshot: snapshot.clone(), name };
        writes.extend(create.name.map(name));
        let (store, lease) = (&self.shared.store, self.shared.lease);
        let stored = match writes.is_empty() {
            true => Ok(()),
            false => store.session_commit(session, lease, now(), writes).await.map(drop),
        };
        if let Err(error) = stored {
            if is_new {
                self.discard(&snapshot).await;
            }
            return Err(error.into());
        }
        self.snapshot_get(session, &snapshot).await
    }

    async fn discard(&self, snapshot: &SnapshotId) {
        let Some(snapshots) = self.shared.sandboxes.provider.snapshots() else { return };
        if let Err(error) = snapshots.remove(snapshot).await {
            let error = error_chain(&error);
            tracing::warn!(%snapshot, error, "cannot remove a snapshot that was not stored");
        }
    }

    async fn snapshot_get(
        &self,
        session: &SessionId,
        snapshot: &SnapshotId,
    ) -> Result<Snapshot, SessionError> {
        let found = self.snapshots(session).await?.into_iter().find(|one| one.id == *snapshot);
        found.ok_or_else(|| SandboxError::no_snapshot(snapshot).into())
    }

    /// Restores files and conversation to the state after a turn, or to another snapshot of the
    /// session. A turn in progress is stopped first, and the current state is saved; later turns
    /// can still be restored. The restore continues when the caller stops waiting.
    ///
    /// # Errors
    /// When the turn or snapshot does not exist, or the outcome of a save is unknown.
    pub async fn restore(
        &self,
        session: &SessionId,
        point: &RestorePoint,
    ) -> Result<(), SessionError> {
        let (snapshot, turn) = match point {
            RestorePoint::Turn(turn) => {
                (self.fork_point(session, Some(*turn)).await?.1.snapshot, Some(*turn))
            }
            RestorePoint::Snapshot(snapshot) => {
                let own = self.own_snapshot(session, snapshot).await?;
                (Some(own.id), own.turn)
            }
        };
        let handle = self.apply(session, Input::Restore { snapshot, turn }).await?;
        let restored = handle.wait_for(|state| {
            state.restoring.is_none() || matches!(state.sandbox, SandboxState::SaveUnknown { .. })
        });
        let state = self.not_found_if_deleted(session, restored.await).await?;
        match &state.sandbox {
            SandboxState::SaveUnknown { detail, .. } if state.restoring.is_some() => {
                Err(save_unknown(detail))
            }
            _ => Ok(()),
        }
    }

    async fn own_snapshot(
        &self,
        session: &SessionId,
        snapshot: &SnapshotId,
    ) -> Result<Snapshot, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        self.shared.check_provider(&record.session)?;
        let all = self.shared.store.snapshot_list(session).await?;
        let own = all.into_iter().find(|one| one.id == *snapshot && !one.gone);
        own.ok_or_else(|| {
            SessionError::conflict(
                "no_snapshot",
                format!("{snapshot} is no snapshot of this session"),
                "`harvest snapshot ls SESSION` lists its snapshots",
            )
        })
    }
}

/// Whether the session has as many requested snapshots without a pin as it may have.
fn is_full(snapshots: &[Snapshot]) -> bool {
    let counts = |one: &&Snapshot| one.kind == SnapshotKind::Request && !one.pinned;
    snapshots.iter().filter(counts).count() >= MAX_REQUESTED
}

/// The disk that a requested snapshot saves.
#[derive(Debug, PartialEq, Eq)]
enum Disk<'a> {
    Running(&'a SandboxId),
    /// The session has no sandbox: its newest snapshot is its disk.
    Saved(&'a SnapshotId),
}

/// The disk of a session. None while its sandbox starts or is being saved: the newest snapshot is
/// an old one then.
fn disk<'a>(session: &SessionId, state: &'a State) -> Result<Disk<'a>, SessionError> {
    match &state.sandbox {
        SandboxState::Ready { sandbox, .. } => Ok(Disk::Running(sandbox)),
        SandboxState::SaveUnknown { detail, .. } => Err(save_unknown(detail)),
        SandboxState::Absent => state.latest_snapshot.as_ref().map(Disk::Saved).ok_or_else(|| {
            SessionError::conflict(
                "nothing_to_save",
                "the session's sandbox holds no work yet",
                "`harvest send SESSION PROMPT` gives it work",
            )
        }),
        SandboxState::Starting { .. }
        | SandboxState::Booting { .. }
        | SandboxState::Stopping { .. } => Err(not_ready(session)),
    }
}

/// The state once the session's sandbox has started or stopped.
async fn settled(handle: &DriverHandle) -> Result<State, SessionError> {
    let is_settled = |state: &State| {
        matches!(
            state.sandbox,
            SandboxState::Ready { .. } | SandboxState::Absent | SandboxState::SaveUnknown { .. }
        )
    };
    let settled = tokio::time::timeout(START_TIMEOUT, handle.wait_for(is_settled)).await;
    settled.unwrap_or_else(|_timeout| Ok(handle.view.borrow().clone()))
}

fn check_name(name: &str) -> Result<(), SessionError> {
    let fits = (1..=MAX_NAME_CHARS).contains(&name.chars().count());
    if fits && !name.chars().any(char::is_control) && name.trim() == name {
        return Ok(());
    }
    Err(SessionError::invalid(
        "invalid_name",
        format!(
            "a snapshot's name must be 1 to {MAX_NAME_CHARS} characters on one line, without \
             leading or trailing blanks"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use harvest_proto::Timestamp;

    use super::*;
    use crate::decide::{DiskOnStop, StopReason};

    #[test]
    fn only_a_session_without_sandbox_reuses_its_snapshot() {
        let (session, sandbox, latest) =
            (SessionId::random(), SandboxId::random(), SnapshotId::random());
        let mut state = State::new(Some(latest.clone()), true);
        assert_eq!(disk(&session, &state).unwrap(), Disk::Saved(&latest));
        for unsettled in [
            SandboxState::Starting { sandbox: sandbox.clone(), since: Timestamp::from_millis(0) },
            SandboxState::Stopping {
                sandbox: sandbox.clone(),
                disk: DiskOnStop::Discard,
                reason: StopReason::Lost("gone".to_owned()),
            },
        ] {
            state.sandbox = unsettled;
            assert_eq!(disk(&session, &state).unwrap_err().code(), "not_ready");
        }
        state = State::new(None, false);
        assert_eq!(disk(&session, &state).unwrap_err().code(), "nothing_to_save");
    }

    #[test]
    fn snapshot_name_is_one_short_line() {
        assert!(check_name("before the rewrite").is_ok());
        for bad in ["", " a", "a\nb", &"n".repeat(101)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
