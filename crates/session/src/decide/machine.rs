//! What the provider says about a session's machine.

use harvest_proto::{
    SnapshotId,
    bridge::BootStart,
    event::{SnapshotKind, TurnOutcome},
};

use super::{Action, Ending, Link, Machine, Rest, Still, Work, step::Deciding};

impl Deciding<'_> {
    pub(super) fn started(&mut self, start: BootStart) {
        let Machine::Starting { sandbox, .. } = &self.state.machine else { return };
        let sandbox = sandbox.clone();
        self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch: self.state.epoch });
        let now = self.moment.now;
        self.state.machine = Machine::Booting {
            sandbox,
            start,
            link: Link::Down { since: now },
            since: now,
            booted: false,
        };
    }

    pub(super) fn start_failed(&mut self, detail: String, permanent: bool) {
        self.failed_to_start("start_failed", detail, permanent);
    }

    /// Tried again until the breaker opens.
    pub(super) fn failed_to_start(&mut self, reason: &str, detail: String, permanent: bool) {
        let (now, clocks) = (self.moment.now, self.moment.clocks);
        self.state.failures.retain(|at| now.since(*at) < clocks.breaker);
        self.state.failures.push(now);
        if permanent || self.state.failures.len() >= clocks.breaker_failures {
            self.fail(reason, detail);
        }
        self.discard(reason);
    }

    pub(super) fn found_running(&mut self) {
        let epoch = self.state.epoch;
        match &self.state.machine {
            Machine::Booting { sandbox, .. } => {
                self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch });
            }
            Machine::Ready { sandbox, work, .. } => {
                self.actions.push(Action::Connect { sandbox: sandbox.clone(), epoch });
                // Whoever keeps its state has it go on first.
                if !matches!(work, Work::Saving(_)) {
                    self.still_as_before();
                }
            }
            _ => {}
        }
    }

    /// The sandbox died, or cannot be reached any more.
    pub(super) fn lost(&mut self, reason: &str) {
        match &self.state.machine {
            Machine::Booting { .. } => {
                self.start_failed(format!("the sandbox ended: {reason}"), false)
            }
            Machine::Ready { work, .. } => {
                if self.state.queue.is_empty() && self.state.rest == Rest::Open {
                    self.state.rest = Rest::Paused { reason: "sandbox_lost".to_owned() };
                }
                match work {
                    Work::Turn(turn) => {
                        let outcome = match turn.stopping {
                            Some(_) => TurnOutcome::Stopped,
                            None => TurnOutcome::Interrupted,
                        };
                        self.end_turn_with_machine(
                            outcome,
                            &format!("the sandbox was lost: {reason}"),
                            reason,
                        );
                    }
                    Work::Saving(save) | Work::Unsaved { save, .. } => {
                        let turn = Some(save.turn.clone());
                        self.end_kept(SnapshotKind::Recovered, turn, reason);
                    }
                    Work::Idle { .. } => self.end_kept(SnapshotKind::Recovered, None, reason),
                }
            }
            _ => {}
        }
    }

    /// Nothing is left of the sandbox: an older state must not take its place in silence.
    pub(super) fn gone(&mut self) {
        match &self.state.machine {
            Machine::Booting { sandbox, .. } => {
                let sandbox = sandbox.clone();
                self.actions.push(Action::SandboxOver { sandbox, reason: "gone".to_owned() });
                self.state.machine = Machine::Absent;
            }
            Machine::Ready { sandbox, .. } => {
                let sandbox = sandbox.clone();
                if let Some(turn) = self.take_turn() {
                    self.turn_over(
                        turn,
                        TurnOutcome::Interrupted,
                        Some("the sandbox is gone".to_owned()),
                    );
                }
                self.actions.push(Action::SandboxOver { sandbox, reason: "gone".to_owned() });
                self.state.machine = Machine::Absent;
                self.fail("sandbox_gone", self.gone_words());
            }
            _ => {}
        }
    }

    pub(super) fn gone_words(&self) -> String {
        match &self.state.disk {
            Some(snapshot) => format!(
                "nothing is left of the sandbox; the next prompt goes on from {snapshot}, which is older"
            ),
            None => "nothing is left of the sandbox; the next prompt starts from the repository"
                .to_owned(),
        }
    }

    pub(super) fn saved(&mut self, snapshot: &SnapshotId, millis: u64) {
        let Machine::Ready { work, .. } = &mut self.state.machine else {
            return self.unwanted(snapshot);
        };
        let Work::Saving(save) = work else { return self.unwanted(snapshot) };
        if save.snapshot != *snapshot {
            return self.unwanted(snapshot);
        }
        self.actions.push(Action::SnapshotTaken {
            snapshot: snapshot.clone(),
            kind: SnapshotKind::Turn,
            turn: Some(save.turn.clone()),
            millis,
        });
        self.state.disk = Some(snapshot.clone());
        *work = Work::Idle { since: self.moment.now, still: Still::Awake };
        self.actions.push(Action::Review);
    }

    pub(super) fn cannot_save(&mut self, snapshot: &SnapshotId) {
        if let Machine::Ready { work, .. } = &mut self.state.machine
            && matches!(work, Work::Saving(save) if save.snapshot == *snapshot)
        {
            *work = Work::Idle { since: self.moment.now, still: Still::Awake };
            self.actions.push(Action::Review);
        }
    }

    pub(super) fn save_failed(&mut self, snapshot: &SnapshotId, detail: String) {
        if let Machine::Ready { work, .. } = &mut self.state.machine
            && let Work::Saving(save) = work
            && save.snapshot == *snapshot
        {
            *work = Work::Unsaved { save: save.clone(), detail };
        } else {
            self.unwanted(snapshot);
        }
    }

    /// The machine was ended while this was taken, and kept as another.
    fn unwanted(&mut self, snapshot: &SnapshotId) {
        if self.state.disk.as_ref() != Some(snapshot) && self.state.saving() != Some(snapshot) {
            self.actions.push(Action::Forget { snapshot: snapshot.clone() });
        }
    }

    pub(super) fn kept(&mut self, snapshot: &SnapshotId, millis: u64) {
        let Machine::Ending { sandbox, how: Ending::Keep(keep), reason } = &self.state.machine
        else {
            return;
        };
        if keep.snapshot != *snapshot {
            return;
        }
        self.actions.push(Action::SnapshotTaken {
            snapshot: snapshot.clone(),
            kind: keep.kind,
            turn: keep.turn.clone(),
            millis,
        });
        let (sandbox, reason) = (sandbox.clone(), reason.clone());
        self.actions.push(Action::SandboxOver { sandbox, reason: reason.clone() });
        self.actions.push(Action::Review);
        self.state.disk = Some(snapshot.clone());
        self.state.machine = Machine::Absent;
        if self.state.rest == Rest::Open && self.state.queue.is_empty() && !self.state.wake {
            self.state.rest = Rest::Paused { reason };
        }
    }

    pub(super) fn keep_failed(&mut self, snapshot: &SnapshotId, detail: String, gone: bool) {
        let Machine::Ending { sandbox, how: Ending::Keep(keep), reason } = &self.state.machine
        else {
            return;
        };
        if keep.snapshot != *snapshot {
            return;
        }
        let (sandbox, reason) = (sandbox.clone(), reason.clone());
        if gone {
            self.actions.push(Action::SandboxOver { sandbox, reason });
            self.state.machine = Machine::Absent;
            self.fail("sandbox_gone", self.gone_words());
        } else {
            self.state.machine = Machine::Held { sandbox, keep: keep.clone(), reason, detail };
        }
    }

    pub(super) fn discarded(&mut self) {
        let Machine::Ending { sandbox, how: Ending::Discard, reason } = &self.state.machine else {
            return;
        };
        self.actions.push(Action::SandboxOver { sandbox: sandbox.clone(), reason: reason.clone() });
        self.state.machine = Machine::Absent;
    }
}
