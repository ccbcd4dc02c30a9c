//! Writes decisions: once for a caller that waits for the outcome, otherwise until it succeeds.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use harvest_proto::Event;
use harvest_store::{StoreError, Write};

use super::{Command, ControlFlow, Driver, DriverExit, preconditions::check_preconditions, writes};
use crate::{
    decide::{Decision, Input},
    error::SessionError,
    error_chain::error_chain,
    wall_clock::now,
};

const FIRST_WAIT: Duration = Duration::from_millis(50);

/// The outcome of a commit of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventCommit {
    Stored,
    /// Nothing is stored: an event of the outbox is missing.
    Gap,
    /// Nothing is stored.
    DiskFull,
}

impl Driver {
    /// Decides and commits for a caller that waits for the outcome: the commit is tried once.
    pub(super) async fn commit_once(
        &mut self,
        input: Input,
        writes: Vec<Write>,
    ) -> Result<(Decision, Vec<Arc<Event>>), SessionError> {
        check_preconditions(&self.state, &input)?;
        let decision = self.decide(input);
        match self.commit(&decision, writes).await {
            Ok(events) => Ok((decision, events)),
            Err(error) => {
                // Releases a slot that was claimed for this decision.
                self.report_slot(false);
                Err(error.into())
            }
        }
    }

    /// Commits until it succeeds: no caller waits who could be told of a failure. While the disk is
    /// full the session stops here, and no effect runs that is not written.
    pub(super) async fn commit_with_retry(
        &mut self,
        decision: Decision,
        writes: Vec<Write>,
    ) -> ControlFlow {
        self.commit_until_stored(&decision, writes).await?;
        self.run_effects(decision).await
    }

    /// Commits events of the sandbox. Does not wait for a full disk, so that the session can be
    /// stopped and deleted meanwhile.
    pub(super) async fn commit_events(
        &mut self,
        decision: &Decision,
        writes: Vec<Write>,
    ) -> Result<EventCommit, DriverExit> {
        let mut wait = FIRST_WAIT;
        loop {
            match self.commit(decision, writes.clone()).await {
                Ok(_) => return Ok(EventCommit::Stored),
                Err(StoreError::OutboxGap { .. }) => return Ok(EventCommit::Gap),
                Err(error) if error.is_disk_full() => {
                    tracing::error!(session = %self.id(), %error, "cannot store events; retrying");
                    self.report_slot(false);
                    return Ok(EventCommit::DiskFull);
                }
                Err(error) => self.after_failed_commit(&mut wait, error).await?,
            }
        }
    }

    async fn commit_until_stored(
        &mut self,
        decision: &Decision,
        mut writes: Vec<Write>,
    ) -> ControlFlow {
        let mut wait = FIRST_WAIT;
        while let Err(error) = self.commit(decision, writes.clone()).await {
            let all = writes.len();
            // The session goes on without the changes of its turn rather than not at all.
            if error.is_disk_full() {
                let optional =
                    |write: &Write| matches!(write, Write::Diff(_) | Write::TurnTree { .. });
                writes.retain(|write| !optional(write));
            }
            if writes.len() < all {
                continue;
            }
            self.after_failed_commit(&mut wait, error).await?;
        }
        Ok(())
    }

    /// Waits before the next attempt, unless no attempt can succeed.
    async fn after_failed_commit(&mut self, wait: &mut Duration, error: StoreError) -> ControlFlow {
        match error {
            StoreError::LeaseLost | StoreError::Closed => Err(DriverExit),
            StoreError::NotFound { what } => {
                tracing::error!(session = %self.id(), what, "the store does not know what a session refers to");
                Err(DriverExit)
            }
            error => {
                tracing::error!(session = %self.id(), %error, "cannot write a session; retrying");
                self.back_off(wait, &error).await
            }
        }
    }

    /// Waits before the next attempt. Commands that arrive meanwhile fail at once with the reason,
    /// except a deletion, which needs no other write before it, and an end of work: for that the
    /// next attempt may use the reserved disk space.
    async fn back_off(&mut self, wait: &mut Duration, error: &StoreError) -> ControlFlow {
        let until = tokio::time::Instant::now() + *wait;
        *wait = (*wait * 2).min(Duration::from_secs(10));
        if let Some(command) = self.postponed.take() {
            self.refuse_command(command, error).await?;
        }
        while let Ok(Some(command)) = tokio::time::timeout_at(until, self.commands.recv()).await {
            if error.is_disk_full()
                && matches!(&command, Command::Apply { input, .. } if input.ends_work())
            {
                self.postponed = Some(command);
                return Ok(());
            }
            self.refuse_command(command, error).await?;
        }
        tokio::time::sleep_until(until).await;
        Ok(())
    }

    async fn refuse_command(&mut self, command: Command, error: &StoreError) -> ControlFlow {
        self.handled += 1;
        let reason = match error {
            StoreError::Commit { reason } => reason.clone(),
            other => error_chain(other),
        };
        let refused = || SessionError::from(StoreError::Commit { reason: reason.clone() });
        match command {
            Command::Prompt(command) => {
                let _ = command.reply.send(Err(refused()));
            }
            Command::Apply { reply, .. } => {
                let _ = reply.send(Err(refused()));
            }
            Command::Delete { reply } => self.delete(reply).await?,
            Command::Bridge { reply } => {
                let _ = reply.send(None);
            }
            // A driver that has to write does not rest.
            Command::Exit => self.rest.leaving.store(false, Ordering::SeqCst),
            Command::UseBegan | Command::UseEnded => {}
        }
        Ok(())
    }

    /// Writes the state and the persisted actions in one transaction; returns its events.
    async fn commit(
        &mut self,
        decision: &Decision,
        mut writes: Vec<Write>,
    ) -> Result<Vec<Arc<Event>>, StoreError> {
        let at = now();
        for action in &decision.actions {
            writes::push(action, at, &mut writes);
        }
        let json =
            serde_json::to_string(&decision.state).expect("a state holds only maps with text keys");
        if json != self.stored_state {
            let resting = decision.state.is_resting(&self.shared.timeouts);
            writes.push(writes::state(&decision.state, json.clone(), resting));
        }
        if decision.state.position() != self.state.position() {
            writes.push(Write::Position(decision.state.position()));
        }
        let mut events = Vec::new();
        if !writes.is_empty() {
            let (store, lease, id) = (&self.shared.store, self.shared.lease, self.id());
            let ends = self.state.is_ending() || decision.state.is_ending();
            let committed = if ends || self.postponed.is_some() {
                store.session_commit_end(id, lease, at, writes).await?
            } else {
                store.session_commit(id, lease, at, writes).await?
            };
            events = committed.events;
        }
        self.stored_state = json;
        self.state = decision.state.clone();
        self.view.send_replace(self.state.clone());
        self.report_slot(false);
        Ok(events)
    }
}
