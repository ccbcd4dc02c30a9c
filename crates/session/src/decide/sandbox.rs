//! Reports of the provider about a session's sandbox.

use std::time::Duration;

use harvest_proto::{
    SnapshotId, StateReason, TurnReason,
    bridge::BootStart,
    event::{SnapshotKind, TurnOutcome},
};

use super::{
    Action, Activity, DiskOnStop, LinkState, Mode, SandboxState, StartFailure, StopReason,
    StopSave, TurnSave, decider::Decider,
};
use crate::sandboxes::Found;

impl Decider<'_> {
    pub(super) fn started(&mut self, start: BootStart) {
        let SandboxState::Starting { sandbox, .. } = &self.state.sandbox else { return };
        let sandbox = sandbox.clone();
        self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch: self.state.epoch });
        let now = self.context.now;
        self.state.sandbox = SandboxState::Booting {
            sandbox,
            start,
            link: LinkState::Down { since: now },
            since: now,
            booted: false,
        };
    }

    /// A full disk does not get emptier by starts in quick succession: the next one waits.
    pub(super) fn start_failed(&mut self, mut detail: String, cause: StartFailure) {
        let (final_failure, window) =
            (cause != StartFailure::Transient, self.context.timeouts.breaker);
        if cause == StartFailure::NoSpace {
            detail += &format!("; the next attempt follows in {} s", window.as_secs());
        }
        self.failed_to_start(StateReason::StartFailed, detail, final_failure, window);
        if cause == StartFailure::NoSpace {
            self.retry_later();
        }
    }

    /// Another start is tried until the circuit breaker opens: after too many failures in `window`.
    pub(super) fn failed_to_start(
        &mut self,
        reason: StateReason,
        detail: String,
        permanent: bool,
        window: Duration,
    ) {
        let now = self.context.now;
        self.state.retry_at = None;
        self.state.start_failures.retain(|at| now.since(*at) < window);
        self.state.start_failures.push(now);
        if permanent || self.state.start_failures.len() >= self.context.timeouts.breaker_failures {
            self.fail(reason, detail);
        }
        self.stop_and_discard(reason.into());
    }

    /// The start or save that failed is tried again when the breaker's window is over.
    pub(super) fn retry_later(&mut self) {
        self.state.retry_at = Some(self.context.now.after(self.context.timeouts.breaker));
    }

    pub(super) fn found_running(&mut self) {
        let epoch = self.state.epoch;
        match &self.state.sandbox {
            SandboxState::Booting { sandbox, .. } => {
                self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch });
                // One of the warm pool is frozen until its session has it.
                self.actions.push(Action::Thaw { sandbox: sandbox.clone() });
            }
            SandboxState::Ready { sandbox, activity, .. } => {
                self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch });
                // A capture thaws the sandbox itself.
                if !matches!(activity, Activity::Saving(_)) {
                    self.reapply_freeze();
                }
            }
            _ => {}
        }
    }

    /// The sandbox died or is unreachable.
    pub(super) fn sandbox_lost(&mut self, reason: &str) {
        match &self.state.sandbox {
            SandboxState::Booting { .. } => {
                let detail = format!("the sandbox ended: {reason}");
                self.start_failed(detail, StartFailure::Transient);
            }
            SandboxState::Ready { .. } => {
                let stopping = self.state.turn().is_some_and(|turn| turn.stopping.is_some());
                if self.state.queue.is_empty() && self.state.mode == Mode::Active {
                    self.state.mode = Mode::Paused { reason: StateReason::SandboxLost };
                }
                let outcome =
                    if stopping { TurnOutcome::Stopped } else { TurnOutcome::Interrupted };
                let error = format!("the sandbox was lost: {reason}");
                self.stop_abruptly(outcome, TurnReason::SandboxLost, &error, reason.into());
            }
            _ => {}
        }
    }

    /// Nothing is left of the sandbox. The session fails visibly instead of silently continuing
    /// from an older snapshot.
    pub(super) fn sandbox_gone(&mut self) {
        match &self.state.sandbox {
            SandboxState::Booting { .. } => self.sandbox_ended("gone".to_owned()),
            SandboxState::Ready { .. } => {
                if let Some(turn) = self.take_turn() {
                    let error = Some("the sandbox is gone".to_owned());
                    let why = Some(TurnReason::SandboxLost);
                    self.record_turn_end(turn, TurnOutcome::Interrupted, why, error);
                }
                self.sandbox_ended("gone".to_owned());
                self.fail(StateReason::SandboxGone, self.gone_message());
            }
            _ => {}
        }
    }

    fn gone_message(&self) -> String {
        match &self.state.latest_snapshot {
            Some(snapshot) => format!(
                "the sandbox and its disk are gone; the next prompt continues from the older {snapshot}"
            ),
            None => "the sandbox and its disk are gone; the next prompt starts from the repository"
                .to_owned(),
        }
    }

    pub(super) fn captured(&mut self, snapshot: &SnapshotId, millis: u64) {
        let Some(save) = self.end_capture(snapshot) else { return self.remove_unwanted(snapshot) };
        self.actions.push(Action::SnapshotTaken {
            snapshot: snapshot.clone(),
            kind: SnapshotKind::Turn,
            turn: Some(save.turn),
            millis,
        });
        self.state.latest_snapshot = Some(snapshot.clone());
        self.state.retry_at = None;
        self.actions.push(Action::Review);
    }

    pub(super) fn capture_unsupported(&mut self, snapshot: &SnapshotId) {
        if self.end_capture(snapshot).is_some() {
            self.actions.push(Action::Review);
        }
    }

    pub(super) fn capture_failed(&mut self, snapshot: &SnapshotId, detail: String) {
        let save = self.end_capture(snapshot);
        if let Some(save) = save
            && let SandboxState::Ready { activity, .. } = &mut self.state.sandbox
        {
            *activity = Activity::SaveFailed { save, detail };
            self.retry_later();
        } else {
            self.remove_unwanted(snapshot);
        }
    }

    /// The sandbox becomes idle, if this is the snapshot that it is captured as.
    fn end_capture(&mut self, snapshot: &SnapshotId) -> Option<TurnSave> {
        let idle = self.idle_now();
        let SandboxState::Ready { activity, .. } = &mut self.state.sandbox else { return None };
        match activity {
            Activity::Saving(save) if save.snapshot == *snapshot => {
                let save = save.clone();
                *activity = idle;
                Some(save)
            }
            _ => None,
        }
    }

    /// The sandbox was stopped during the capture and saved as another snapshot.
    fn remove_unwanted(&mut self, snapshot: &SnapshotId) {
        if self.state.latest_snapshot.as_ref() != Some(snapshot)
            && self.state.saving() != Some(snapshot)
        {
            self.actions.push(Action::RemoveSnapshot { snapshot: snapshot.clone() });
        }
    }

    pub(super) fn stopped_and_saved(&mut self, snapshot: &SnapshotId, millis: u64) {
        let Some((save, reason)) = self.stop_save(snapshot) else { return };
        let StopSave { snapshot, kind, turn, ending } = save;
        self.record_ending(ending);
        self.state.latest_snapshot = Some(snapshot.clone());
        self.state.retry_at = None;
        self.actions.push(Action::SnapshotTaken { snapshot, kind, turn, millis });
        self.sandbox_ended(reason.to_string());
        self.actions.push(Action::Review);
        if self.state.mode == Mode::Active
            && self.state.queue.is_empty()
            && !self.state.start_requested
        {
            self.state.mode = Mode::Paused { reason: reason.state() };
        }
    }

    pub(super) fn stop_save_failed(
        &mut self,
        snapshot: &SnapshotId,
        detail: String,
        found: Option<&Found>,
    ) {
        let Some((mut save, reason)) = self.stop_save(snapshot) else { return };
        if let Some(Found::Dead { .. } | Found::Gone) = found {
            self.record_ending(save.ending.take());
        }
        if found == Some(&Found::Gone) {
            self.sandbox_ended(reason.to_string());
            self.fail(StateReason::SandboxGone, self.gone_message());
        } else if let Some(sandbox) = self.state.sandbox_id().cloned() {
            self.state.sandbox = SandboxState::SaveUnknown { sandbox, save, reason, detail };
            self.retry_later();
        }
    }

    /// How and why the sandbox stops, if its disk is saved as this snapshot.
    fn stop_save(&self, snapshot: &SnapshotId) -> Option<(StopSave, StopReason)> {
        match &self.state.sandbox {
            SandboxState::Stopping { disk: DiskOnStop::Save(save), reason, .. }
                if save.snapshot == *snapshot =>
            {
                Some((save.clone(), reason.clone()))
            }
            _ => None,
        }
    }

    pub(super) fn discarded(&mut self) {
        if let SandboxState::Stopping { disk: DiskOnStop::Discard, reason, .. } =
            &self.state.sandbox
        {
            self.sandbox_ended(reason.to_string());
        }
    }
}
