//! How the world carries out what was decided, with good or bad luck.

use super::*;

impl World {
    pub(in super::super) fn carry_out(&mut self, mut index: usize, luck: Luck) {
        if over_the_bridge(&self.pending[index]) {
            // One connection: what was said first is heard first.
            index = self.pending.iter().position(over_the_bridge).unwrap();
        }
        let action = self.pending.remove(index);
        let epoch = self.state.epoch;
        match action {
            Action::Start { sandbox, epoch, .. } => self.start(sandbox, epoch, luck),
            Action::Find { sandbox } => {
                // The answer is about the sandbox that was asked for, however late it comes.
                let epoch = self.sandboxes[&sandbox].epoch;
                let found = match self.sandboxes.get(&sandbox) {
                    Some(sandbox) if sandbox.alive => Input::FoundRunning { epoch },
                    Some(sandbox) if sandbox.left => {
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
                    let end = match luck {
                        Luck::Good => Input::BootReady { epoch },
                        Luck::Bad => Input::BootFailed { epoch, detail: "setup.sh".into() },
                    };
                    sandbox.outbox.push(end);
                }
            }
            Action::Prepare => {
                if self.current().is_some_and(|sandbox| sandbox.linked) {
                    self.input(Input::Prepared { epoch });
                }
            }
            Action::Send { prompt, .. } => self.send(prompt, luck),
            Action::StopTurn { .. } => {
                if luck == Luck::Good {
                    self.end_turn(TurnOutcome::Stopped);
                }
            }
            Action::Answer { request, .. } => {
                if let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked)
                    && sandbox.asks.as_ref() == Some(&request)
                {
                    sandbox.asks = None;
                    sandbox.outbox.push(Input::RequestClosed { request, answered: true });
                }
            }
            Action::Freeze { sandbox } => self.freeze(&sandbox, luck),
            Action::Thaw { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(&sandbox) {
                    sandbox.still = false;
                }
                self.input(Input::Thawed { epoch });
            }
            Action::Capture { sandbox, snapshot } => self.capture(&sandbox, snapshot, luck),
            Action::EndKept { sandbox, snapshot, .. } => self.end_kept(&sandbox, snapshot, luck),
            Action::Forget { snapshot } => {
                assert_ne!(
                    self.state.disk.as_ref(),
                    Some(&snapshot),
                    "what is needed is not forgotten"
                );
                assert!(self.turns.values().all(|kept| *kept != snapshot), "nor what is known");
                self.snapshots.remove(&snapshot);
            }
            Action::End { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(&sandbox) {
                    assert!(!sandbox.worked, "work is never thrown away");
                    (sandbox.alive, sandbox.left) = (false, false);
                }
                self.input(Input::Discarded { epoch });
            }
            other => unreachable!("{other:?} is kept, not carried out"),
        }
    }

    fn freeze(&mut self, id: &SandboxId, luck: Luck) {
        let Some(sandbox) = self.sandboxes.get_mut(id).filter(|sandbox| sandbox.alive) else {
            return;
        };
        let epoch = sandbox.epoch;
        sandbox.still = luck == Luck::Good;
        self.input(match luck {
            Luck::Good => Input::Froze { epoch },
            Luck::Bad => Input::FreezeFailed { epoch },
        });
    }

    fn start(&mut self, id: SandboxId, epoch: u64, luck: Luck) {
        if luck == Luck::Bad {
            return self.input(Input::StartFailed { epoch, detail: "no".into(), permanent: false });
        }
        // What comes up after it was given up is ended at once.
        if epoch != self.state.epoch || !matches!(self.state.machine, Machine::Starting { .. }) {
            return;
        }
        let sandbox = Sandbox { epoch, alive: true, left: true, ..Sandbox::default() };
        self.sandboxes.insert(id, sandbox);
        self.input(Input::Started { epoch, start: BootStart::Fresh });
    }

    fn connect(&mut self, id: &SandboxId, epoch: u64) {
        let Some(sandbox) = self.sandboxes.get_mut(id) else { return };
        if !sandbox.alive {
            return self.input(Input::SandboxEnded { epoch, reason: "killed".into() });
        }
        sandbox.linked = true;
        self.told = true;
        let status = Status { prompts: sandbox.seen.clone(), ..Status::default() };
        self.input(Input::LinkUp { epoch, status });
    }

    fn send(&mut self, prompt: PromptId, luck: Luck) {
        let dispatched = self.prompts[&prompt] == PromptStatus::Dispatched;
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked) else { return };
        if luck == Luck::Bad {
            // The connection broke before the supervisor read it.
            return self.drop_link();
        }
        if !sandbox.seen.iter().any(|(seen, _)| *seen == prompt) {
            assert!(dispatched, "only a dispatched prompt is sent");
            assert!(!sandbox.still, "nothing is sent to what stands still");
            assert!(
                sandbox.seen.iter().all(|(_, how)| *how == PromptProgress::Ended),
                "a prompt is never sent while another runs"
            );
            assert!(!sandbox.unsaved_turn, "the last turn is kept before the next prompt is sent");
            sandbox.worked = true;
            sandbox.seen.push((prompt.clone(), PromptProgress::Running));
            *self.runs.entry(prompt.clone()).or_default() += 1;
            assert_eq!(self.runs[&prompt], 1, "a prompt never runs twice");
        }
        self.input(Input::Accepted { prompt });
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
        if let Some(request) = sandbox.asks.take() {
            sandbox.outbox.push(Input::RequestClosed { request, answered: false });
        }
        sandbox.outbox.push(Input::TurnEnded { prompt, outcome });
        sandbox.unsaved_turn = true;
    }

    fn capture(&mut self, id: &SandboxId, snapshot: SnapshotId, luck: Luck) {
        match self.sandboxes.get_mut(id) {
            Some(sandbox) if sandbox.alive && luck == Luck::Good => {
                sandbox.unsaved_turn = false;
                self.snapshots.insert(snapshot.clone());
                self.newest = Some(snapshot.clone());
                self.input(Input::Saved { snapshot, millis: 1 });
            }
            _ => self.input(Input::SaveFailed { snapshot, detail: "disk full".into() }),
        }
    }

    fn end_kept(&mut self, id: &SandboxId, snapshot: SnapshotId, luck: Luck) {
        let sandbox = self.sandboxes.get_mut(id).unwrap();
        sandbox.alive = false;
        if luck == Luck::Bad {
            self.unknown = true;
            return self.input(Input::KeepFailed {
                snapshot,
                detail: "timeout".into(),
                gone: false,
            });
        }
        assert!(sandbox.left || self.snapshots.contains(&snapshot), "a disk is kept under one id");
        (sandbox.left, sandbox.worked) = (false, false);
        self.unknown = false;
        self.snapshots.insert(snapshot.clone());
        self.newest = Some(snapshot.clone());
        self.input(Input::Kept { snapshot, millis: 1 });
    }
}
