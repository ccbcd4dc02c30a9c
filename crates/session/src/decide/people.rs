//! What people want of a session.

use std::mem;

use harvest_proto::{
    PromptId,
    api::PromptStatus,
    event::{SnapshotKind, TurnOutcome},
};

use super::{Action, Ending, Link, Machine, Rest, Save, Work, step::Deciding};

impl Deciding<'_> {
    pub(super) fn queued(&mut self, prompt: PromptId, now: bool) {
        if !now
            && let Machine::Ready { link, work: Work::Turn(turn), .. } = &mut self.state.machine
            && turn.stopping.is_none()
            && let Some(asked) = &mut turn.asked
            && asked.answer.is_none()
        {
            asked.answer = Some(prompt.clone());
            if *link == Link::Up {
                self.actions.push(Action::Answer { request: asked.request.clone(), prompt });
            }
            return;
        }
        if now {
            self.state.queue.push_front(prompt);
            let queue = self.state.queue.iter().cloned().collect();
            self.actions.push(Action::Order { queue, moved: None });
            self.fence();
        } else {
            self.state.queue.push_back(prompt);
        }
        if matches!(self.state.rest, Rest::Failed { .. }) {
            self.state.failures.clear();
        }
        if self.state.rest != Rest::Archived {
            self.state.rest = Rest::Open;
        }
    }

    pub(super) fn cancelled(&mut self, prompt: &PromptId) {
        let before = self.state.queue.len();
        self.state.queue.retain(|waiting| waiting != prompt);
        if self.state.queue.len() < before {
            self.mark(prompt.clone(), PromptStatus::Queued, PromptStatus::Cancelled);
        }
    }

    pub(super) fn moved(&mut self, prompt: PromptId, position: u32) {
        let Some(old) = self.state.queue.iter().position(|waiting| *waiting == prompt) else {
            return;
        };
        self.state.queue.remove(old);
        let place = (position.max(1) as usize - 1).min(self.state.queue.len());
        self.state.queue.insert(place, prompt.clone());
        let queue = self.state.queue.iter().cloned().collect();
        let place = u32::try_from(place + 1).unwrap_or(u32::MAX);
        self.actions.push(Action::Order { queue, moved: Some((prompt, place)) });
    }

    pub(super) fn stop(&mut self) {
        match &self.state.machine {
            Machine::Ready { work: Work::Turn(_), .. } => self.fence(),
            Machine::Starting { .. } | Machine::Booting { .. } => self.rest("stopped"),
            Machine::Absent if self.state.rest == Rest::Open => self.rest("stopped"),
            _ => {}
        }
    }

    pub(super) fn rest(&mut self, reason: &str) {
        if self.state.rest != Rest::Archived {
            self.state.rest = Rest::Paused { reason: reason.to_owned() };
        }
        self.state.wake = false;
    }

    /// The machine is killed now, whatever it does. What it left is kept all the same.
    pub(super) fn terminate(&mut self) {
        const REASON: &str = "terminated";
        self.rest(REASON);
        let Machine::Ready { work, .. } = &self.state.machine else { return };
        match work {
            Work::Turn(_) => {
                self.end_turn_with_machine(
                    TurnOutcome::Stopped,
                    "the sandbox was terminated",
                    REASON,
                );
            }
            Work::Saving(save) | Work::Unsaved { save, .. } => {
                let turn = Some(save.turn.clone());
                self.end_kept(SnapshotKind::Recovered, turn, REASON);
            }
            Work::Idle { .. } => self.end_kept(SnapshotKind::Recovered, None, REASON),
        }
    }

    pub(super) fn archive(&mut self) {
        self.state.rest = Rest::Archived;
        self.state.wake = false;
    }

    pub(super) fn resume(&mut self) {
        self.state.rest = Rest::Open;
        self.state.wake = true;
        self.state.failures.clear();
        match mem::replace(&mut self.state.machine, Machine::Absent) {
            // The same snapshot id: whatever was done of it counts.
            Machine::Held { sandbox, keep, reason, .. } => {
                self.actions.push(Action::EndKept {
                    sandbox: sandbox.clone(),
                    snapshot: keep.snapshot.clone(),
                    kind: keep.kind,
                });
                self.state.machine = Machine::Ending { sandbox, how: Ending::Keep(keep), reason };
            }
            Machine::Ready { sandbox, link, born, work: Work::Unsaved { save, .. } } => {
                let work = Work::Saving(Save { later: true, ..save });
                self.state.machine = Machine::Ready { sandbox, link, born, work };
                self.save();
            }
            other => self.state.machine = other,
        }
    }

    pub(super) fn touched(&mut self) {
        if let Machine::Ready { work: Work::Idle { since, .. }, .. } = &mut self.state.machine {
            *since = self.moment.now;
        }
        self.thaw();
    }
}
