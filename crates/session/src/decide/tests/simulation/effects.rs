//! Executes the effects of a decision, with success or failure.

use super::*;

impl Simulation {
    pub(in super::super) fn execute(&mut self, mut index: usize, outcome: EffectOutcome) {
        if uses_bridge(&self.pending[index]) {
            // One connection delivers in order.
            index = self.pending.iter().position(uses_bridge).unwrap();
        }
        let action = self.pending.remove(index);
        let epoch = self.state.epoch;
        match action {
            Action::Start { sandbox, epoch, .. } => self.start(sandbox, epoch, outcome),
            Action::Find { sandbox } => {
                // A late answer is still about the sandbox it was asked about.
                let epoch = self.sandboxes[&sandbox].epoch;
                let found = match self.sandboxes.get(&sandbox) {
                    Some(sandbox) if sandbox.alive => Input::FoundRunning { epoch },
                    Some(sandbox) if sandbox.disk_left => {
                        Input::SandboxEnded { epoch, reason: "killed".into() }
                    }
                    _ => Input::FoundGone { epoch },
                };
                self.input(found);
            }
            Action::Connect { sandbox, epoch } => self.connect(&sandbox, epoch),
            Action::Boot { .. } => {
                if let Some(sandbox) =
                    self.current().filter(|sandbox| sandbox.linked && !sandbox.booted)
                {
                    sandbox.booted = true;
                    let epoch = sandbox.epoch;
                    let end = match outcome {
                        EffectOutcome::Success => Input::BootReady { epoch },
                        EffectOutcome::Failure => {
                            Input::BootFailed { epoch, detail: "setup.sh".into(), permanent: false }
                        }
                    };
                    sandbox.outbox.push(end);
                }
            }
            Action::Prepare => {
                if self.current().is_some_and(|sandbox| sandbox.linked) {
                    self.input(Input::Prepared { epoch });
                }
            }
            Action::SendPrompt { prompt, .. } => self.send(prompt, outcome),
            Action::StopTurn { .. } => {
                if outcome == EffectOutcome::Success {
                    self.end_turn(TurnOutcome::Stopped);
                }
            }
            Action::Answer { request, .. } => {
                if let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked)
                    && sandbox.question.as_ref() == Some(&request)
                {
                    sandbox.question = None;
                    sandbox.outbox.push(Input::RequestClosed { request, answered: true });
                }
            }
            Action::Freeze { sandbox } | Action::HandOver { sandbox } => {
                self.freeze(&sandbox, outcome)
            }
            Action::Thaw { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(&sandbox) {
                    sandbox.frozen = false;
                }
                self.input(Input::Thawed { epoch });
            }
            Action::Capture { sandbox, snapshot } => self.capture(&sandbox, snapshot, outcome),
            Action::StopAndSave { sandbox, snapshot, .. } => {
                self.end_kept(&sandbox, snapshot, outcome)
            }
            Action::RemoveSnapshot { snapshot } => {
                assert_ne!(
                    self.state.latest_snapshot.as_ref(),
                    Some(&snapshot),
                    "the latest snapshot is not removed"
                );
                assert!(
                    self.turns.values().all(|stored| *stored != snapshot),
                    "nor a turn's snapshot"
                );
                self.snapshots.remove(&snapshot);
            }
            Action::StopAndDiscard { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(&sandbox) {
                    assert!(!sandbox.has_work, "work is never discarded");
                    (sandbox.alive, sandbox.disk_left) = (false, false);
                }
                self.input(Input::Discarded { epoch });
            }
            other => unreachable!("{other:?} is persisted, not executed"),
        }
    }

    fn freeze(&mut self, id: &SandboxId, outcome: EffectOutcome) {
        let Some(sandbox) = self.sandboxes.get_mut(id).filter(|sandbox| sandbox.alive) else {
            return;
        };
        let epoch = sandbox.epoch;
        sandbox.frozen = outcome == EffectOutcome::Success;
        self.input(match outcome {
            EffectOutcome::Success => Input::Frozen { epoch },
            EffectOutcome::Failure => Input::FreezeFailed { epoch },
        });
    }

    fn start(&mut self, id: SandboxId, epoch: u64, outcome: EffectOutcome) {
        if outcome == EffectOutcome::Failure {
            let cause = StartFailure::Transient;
            return self.input(Input::StartFailed { epoch, detail: "no".into(), cause });
        }
        // A sandbox that starts after the timeout is removed at once.
        if epoch != self.state.epoch || !matches!(self.state.sandbox, SandboxState::Starting { .. })
        {
            return;
        }
        let sandbox = Sandbox { epoch, alive: true, disk_left: true, ..Sandbox::default() };
        self.sandboxes.insert(id, sandbox);
        self.input(Input::Started { epoch, start: BootStart::Fresh });
    }

    fn connect(&mut self, id: &SandboxId, epoch: u64) {
        let Some(sandbox) = self.sandboxes.get_mut(id) else { return };
        if !sandbox.alive {
            return self.input(Input::SandboxEnded { epoch, reason: "killed".into() });
        }
        sandbox.linked = true;
        self.busy_known = true;
        let status = Status { prompts: sandbox.seen.clone(), ..Status::default() };
        self.input(Input::LinkUp { epoch, status });
    }

    fn send(&mut self, prompt: PromptId, outcome: EffectOutcome) {
        let dispatched = self.prompts[&prompt] == PromptStatus::Dispatched;
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked) else { return };
        if outcome == EffectOutcome::Failure {
            // The connection broke before the supervisor read it.
            return self.drop_link();
        }
        if !sandbox.seen.iter().any(|(seen, _)| *seen == prompt) {
            assert!(dispatched, "only a dispatched prompt is sent");
            assert!(!sandbox.frozen, "nothing is sent to a frozen sandbox");
            assert!(
                sandbox.seen.iter().all(|(_, how)| *how == PromptProgress::Ended),
                "a prompt is never sent while another runs"
            );
            assert!(!sandbox.unsaved_turn, "the last turn is saved before the next prompt is sent");
            sandbox.has_work = true;
            sandbox.seen.push((prompt.clone(), PromptProgress::Running));
            *self.runs.entry(prompt.clone()).or_default() += 1;
            assert_eq!(self.runs[&prompt], 1, "a prompt never runs twice");
        }
        self.input(Input::PromptAccepted { prompt });
    }

    pub(in super::super) fn end_turn(&mut self, outcome: TurnOutcome) {
        let Some(sandbox) = self.current() else { return };
        let Some((prompt, how)) =
            sandbox.seen.last_mut().filter(|(_, how)| *how == PromptProgress::Running)
        else {
            return;
        };
        *how = PromptProgress::Ended;
        let prompt = prompt.clone();
        if let Some(request) = sandbox.question.take() {
            sandbox.outbox.push(Input::RequestClosed { request, answered: false });
        }
        let reason = (outcome == TurnOutcome::Failed).then_some(TurnReason::Budget);
        sandbox.outbox.push(Input::TurnEnded { prompt, outcome, reason });
        sandbox.unsaved_turn = true;
    }

    fn capture(&mut self, id: &SandboxId, snapshot: SnapshotId, outcome: EffectOutcome) {
        match self.sandboxes.get_mut(id) {
            Some(sandbox) if sandbox.alive && outcome == EffectOutcome::Success => {
                sandbox.unsaved_turn = false;
                // The driver thaws a sandbox before it captures it.
                sandbox.frozen = false;
                self.snapshots.insert(snapshot.clone());
                self.newest = Some(snapshot.clone());
                self.input(Input::Captured { snapshot, millis: 1 });
            }
            _ => self.input(Input::CaptureFailed { snapshot, detail: "disk full".into() }),
        }
    }

    fn end_kept(&mut self, id: &SandboxId, snapshot: SnapshotId, outcome: EffectOutcome) {
        let sandbox = self.sandboxes.get_mut(id).unwrap();
        sandbox.alive = false;
        if outcome == EffectOutcome::Failure {
            self.unknown = true;
            return self.input(Input::StopSaveFailed {
                snapshot,
                detail: "timeout".into(),
                found: Some(Found::Dead { reason: "killed".into() }),
            });
        }
        assert!(
            sandbox.disk_left || self.snapshots.contains(&snapshot),
            "a disk is saved under one id"
        );
        (sandbox.disk_left, sandbox.has_work) = (false, false);
        self.unknown = false;
        self.snapshots.insert(snapshot.clone());
        self.newest = Some(snapshot.clone());
        self.input(Input::StoppedAndSaved { snapshot, millis: 1 });
    }
}
