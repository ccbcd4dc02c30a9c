//! Requests of users.

use std::mem;

use harvest_proto::{PromptId, StateReason, TurnReason, api::PromptStatus, event::TurnOutcome};

use super::{
    Action, Activity, DiskOnStop, LinkState, Mode, SandboxState, TurnSave, decider::Decider,
};

impl Decider<'_> {
    pub(super) fn prompt_queued(&mut self, prompt: PromptId, now: bool) {
        if !now
            && let SandboxState::Ready { link, activity: Activity::Turn(turn), .. } =
                &mut self.state.sandbox
            && turn.stopping.is_none()
            && let Some(question) = &mut turn.question
            && question.answer.is_none()
        {
            question.answer = Some(prompt.clone());
            if *link == LinkState::Up {
                self.actions.push(Action::Answer { request: question.request.clone(), prompt });
            }
            return;
        }
        if now {
            self.state.queue.push_front(prompt);
            let queue = self.state.queue.iter().cloned().collect();
            self.actions.push(Action::ReorderQueue { queue, moved: None });
            self.request_turn_stop();
        } else {
            self.state.queue.push_back(prompt);
        }
        if matches!(self.state.mode, Mode::Failed { .. }) {
            self.state.start_failures.clear();
            self.state.retry_at = None;
        }
        if self.state.mode != Mode::Archived {
            self.state.mode = Mode::Active;
        }
    }

    pub(super) fn prompt_cancelled(&mut self, prompt: &PromptId) {
        let before = self.state.queue.len();
        self.state.queue.retain(|waiting| waiting != prompt);
        if self.state.queue.len() < before {
            self.set_prompt_status(prompt.clone(), PromptStatus::Queued, PromptStatus::Cancelled);
        }
    }

    pub(super) fn prompt_moved(&mut self, prompt: PromptId, position: u32) {
        let Some(old) = self.state.queue.iter().position(|waiting| *waiting == prompt) else {
            return;
        };
        self.state.queue.remove(old);
        let index = (position.max(1) as usize - 1).min(self.state.queue.len());
        self.state.queue.insert(index, prompt.clone());
        let queue = self.state.queue.iter().cloned().collect();
        let position = u32::try_from(index + 1).unwrap_or(u32::MAX);
        self.actions.push(Action::ReorderQueue { queue, moved: Some((prompt, position)) });
    }

    pub(super) fn stop(&mut self) {
        match &self.state.sandbox {
            SandboxState::Ready { activity: Activity::Turn(_), .. } => self.request_turn_stop(),
            SandboxState::Starting { .. } | SandboxState::Booting { .. } => {
                self.pause(StateReason::Stopped)
            }
            SandboxState::Absent if self.state.mode == Mode::Active => {
                self.pause(StateReason::Stopped)
            }
            _ => {}
        }
    }

    pub(super) fn pause(&mut self, reason: StateReason) {
        if self.state.mode != Mode::Archived {
            self.state.mode = Mode::Paused { reason };
        }
        self.state.start_requested = false;
        self.cancel_retry();
    }

    /// Kills the sandbox at once, whatever it does. Its disk is saved as recovered.
    pub(super) fn terminate(&mut self) {
        const REASON: StateReason = StateReason::Terminated;
        self.pause(REASON);
        if matches!(self.state.sandbox, SandboxState::Ready { .. }) {
            let (outcome, why) = (TurnOutcome::Stopped, TurnReason::Terminated);
            self.stop_abruptly(outcome, why, "the sandbox was terminated", REASON.into());
        }
    }

    pub(super) fn archive(&mut self) {
        self.state.mode = Mode::Archived;
        self.state.start_requested = false;
        self.cancel_retry();
    }

    /// A start is not retried once it is no longer wanted; a save of unknown outcome is.
    fn cancel_retry(&mut self) {
        if !matches!(self.state.sandbox, SandboxState::SaveUnknown { .. }) {
            self.state.retry_at = None;
        }
    }

    pub(super) fn resume(&mut self) {
        self.state.mode = Mode::Active;
        self.state.start_requested = true;
        self.state.start_failures.clear();
        self.state.retry_at = None;
        self.retry_save();
    }

    /// Retries what failed, without a request: a disk that was full may have room again.
    pub(super) fn retry_failed(&mut self) {
        if self.state.sandbox == SandboxState::Absent
            && matches!(self.state.mode, Mode::Failed { .. })
        {
            self.resume();
        }
        self.retry_save();
    }

    /// Retries a save that failed or whose outcome is unknown.
    fn retry_save(&mut self) {
        match mem::replace(&mut self.state.sandbox, SandboxState::Absent) {
            // The same snapshot id: the retry continues what the first attempt did.
            SandboxState::SaveUnknown { sandbox, save, reason, .. } => {
                self.actions.push(Action::StopAndSave {
                    sandbox: sandbox.clone(),
                    snapshot: save.snapshot.clone(),
                    kind: save.kind,
                });
                self.state.sandbox =
                    SandboxState::Stopping { sandbox, disk: DiskOnStop::Save(save), reason };
            }
            SandboxState::Ready {
                sandbox,
                link,
                ready_since,
                activity: Activity::SaveFailed { save, .. },
            } => {
                let activity = Activity::Saving(TurnSave { deferred: true, ..save });
                self.state.sandbox = SandboxState::Ready { sandbox, link, ready_since, activity };
                self.start_capture();
            }
            other => self.state.sandbox = other,
        }
    }

    pub(super) fn touched(&mut self) {
        if let SandboxState::Ready { activity: Activity::Idle { since, .. }, .. } =
            &mut self.state.sandbox
        {
            *since = self.context.now;
        }
        self.thaw();
    }
}
