//! Reports of the provider about a session's sandbox.

use harvest_proto::{
    SnapshotId, StateReason,
    bridge::BootStart,
    event::{SnapshotKind, TurnOutcome},
};

use super::{
    Action, Activity, DiskOnStop, FreezeState, LinkState, Mode, SandboxState, decider::Decider,
};

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

    pub(super) fn start_failed(&mut self, detail: String, permanent: bool) {
        self.failed_to_start(StateReason::StartFailed, detail, permanent);
    }

    /// Another start is tried until the circuit breaker opens.
    pub(super) fn failed_to_start(&mut self, reason: StateReason, detail: String, permanent: bool) {
        let (now, timeouts) = (self.context.now, self.context.timeouts);
        self.state.start_failures.retain(|at| now.since(*at) < timeouts.breaker);
        self.state.start_failures.push(now);
        if permanent || self.state.start_failures.len() >= timeouts.breaker_failures {
            self.fail(reason, detail);
        }
        self.stop_and_discard(reason.into());
    }

    pub(super) fn found_running(&mut self) {
        let epoch = self.state.epoch;
        match &self.state.sandbox {
            SandboxState::Booting { sandbox, .. } => {
                self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch });
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
                self.start_failed(format!("the sandbox ended: {reason}"), false)
            }
            SandboxState::Ready { activity, .. } => {
                if self.state.queue.is_empty() && self.state.mode == Mode::Active {
                    self.state.mode = Mode::Paused { reason: StateReason::SandboxLost };
                }
                match activity {
                    Activity::Turn(turn) => {
                        let outcome = match turn.stopping {
                            Some(_) => TurnOutcome::Stopped,
                            None => TurnOutcome::Interrupted,
                        };
                        self.end_turn_with_sandbox(
                            outcome,
                            &format!("the sandbox was lost: {reason}"),
                            reason.into(),
                        );
                    }
                    Activity::Saving(save) | Activity::SaveFailed { save, .. } => {
                        let turn = Some(save.turn.clone());
                        self.stop_and_save(SnapshotKind::Recovered, turn, reason.into());
                    }
                    Activity::Idle { .. } => {
                        self.stop_and_save(SnapshotKind::Recovered, None, reason.into())
                    }
                }
            }
            _ => {}
        }
    }

    /// Nothing is left of the sandbox. The session fails visibly instead of silently continuing
    /// from an older snapshot.
    pub(super) fn sandbox_gone(&mut self) {
        match &self.state.sandbox {
            SandboxState::Booting { sandbox, .. } => {
                let sandbox = sandbox.clone();
                self.actions.push(Action::SandboxEnded { sandbox, reason: "gone".to_owned() });
                self.state.sandbox = SandboxState::Absent;
            }
            SandboxState::Ready { sandbox, .. } => {
                let sandbox = sandbox.clone();
                if let Some(turn) = self.take_turn() {
                    self.record_turn_end(
                        turn,
                        TurnOutcome::Interrupted,
                        Some("the sandbox is gone".to_owned()),
                    );
                }
                self.actions.push(Action::SandboxEnded { sandbox, reason: "gone".to_owned() });
                self.state.sandbox = SandboxState::Absent;
                self.fail(StateReason::SandboxGone, self.gone_message());
            }
            _ => {}
        }
    }

    pub(super) fn gone_message(&self) -> String {
        match &self.state.latest_snapshot {
            Some(snapshot) => format!(
                "the sandbox and its disk are gone; the next prompt continues from the older {snapshot}"
            ),
            None => "the sandbox and its disk are gone; the next prompt starts from the repository"
                .to_owned(),
        }
    }

    pub(super) fn captured(&mut self, snapshot: &SnapshotId, millis: u64) {
        let SandboxState::Ready { activity, .. } = &mut self.state.sandbox else {
            return self.remove_unwanted(snapshot);
        };
        let Activity::Saving(save) = activity else { return self.remove_unwanted(snapshot) };
        if save.snapshot != *snapshot {
            return self.remove_unwanted(snapshot);
        }
        self.actions.push(Action::SnapshotTaken {
            snapshot: snapshot.clone(),
            kind: SnapshotKind::Turn,
            turn: Some(save.turn.clone()),
            millis,
        });
        self.state.latest_snapshot = Some(snapshot.clone());
        *activity = Activity::Idle { since: self.context.now, freeze: FreezeState::Running };
        self.actions.push(Action::Review);
    }

    pub(super) fn capture_unsupported(&mut self, snapshot: &SnapshotId) {
        if let SandboxState::Ready { activity, .. } = &mut self.state.sandbox
            && matches!(activity, Activity::Saving(save) if save.snapshot == *snapshot)
        {
            *activity = Activity::Idle { since: self.context.now, freeze: FreezeState::Running };
            self.actions.push(Action::Review);
        }
    }

    pub(super) fn capture_failed(&mut self, snapshot: &SnapshotId, detail: String) {
        if let SandboxState::Ready { activity, .. } = &mut self.state.sandbox
            && let Activity::Saving(save) = activity
            && save.snapshot == *snapshot
        {
            *activity = Activity::SaveFailed { save: save.clone(), detail };
        } else {
            self.remove_unwanted(snapshot);
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
        let SandboxState::Stopping { sandbox, disk: DiskOnStop::Save(save), reason } =
            &self.state.sandbox
        else {
            return;
        };
        if save.snapshot != *snapshot {
            return;
        }
        self.actions.push(Action::SnapshotTaken {
            snapshot: snapshot.clone(),
            kind: save.kind,
            turn: save.turn.clone(),
            millis,
        });
        let (sandbox, paused) = (sandbox.clone(), reason.state());
        self.actions.push(Action::SandboxEnded { sandbox, reason: reason.to_string() });
        self.actions.push(Action::Review);
        self.state.latest_snapshot = Some(snapshot.clone());
        self.state.sandbox = SandboxState::Absent;
        if self.state.mode == Mode::Active
            && self.state.queue.is_empty()
            && !self.state.start_requested
        {
            self.state.mode = Mode::Paused { reason: paused };
        }
    }

    pub(super) fn stop_save_failed(&mut self, snapshot: &SnapshotId, detail: String, gone: bool) {
        let SandboxState::Stopping { sandbox, disk: DiskOnStop::Save(save), reason } =
            &self.state.sandbox
        else {
            return;
        };
        if save.snapshot != *snapshot {
            return;
        }
        let (sandbox, reason) = (sandbox.clone(), reason.clone());
        if gone {
            self.actions.push(Action::SandboxEnded { sandbox, reason: reason.to_string() });
            self.state.sandbox = SandboxState::Absent;
            self.fail(StateReason::SandboxGone, self.gone_message());
        } else {
            self.state.sandbox =
                SandboxState::SaveUnknown { sandbox, save: save.clone(), reason, detail };
        }
    }

    pub(super) fn discarded(&mut self) {
        let SandboxState::Stopping { sandbox, disk: DiskOnStop::Discard, reason } =
            &self.state.sandbox
        else {
            return;
        };
        self.actions
            .push(Action::SandboxEnded { sandbox: sandbox.clone(), reason: reason.to_string() });
        self.state.sandbox = SandboxState::Absent;
    }
}
