//! What the supervisor says from inside the machine.

use harvest_proto::{
    PromptId,
    api::PromptStatus,
    bridge::{BootStart, PromptProgress, Status},
    event::{SnapshotKind, TurnOutcome},
};

use super::{Action, Asked, Link, Machine, Still, Turn, Work, step::Deciding};

impl Deciding<'_> {
    pub(super) fn link_up(&mut self, status: &Status) {
        match &mut self.state.machine {
            Machine::Booting { link, start, booted, .. } => {
                *link = Link::Up;
                let resume = *start == BootStart::Restore && self.state.conversed;
                let action =
                    if *booted { Action::Prepare } else { Action::Boot { start: *start, resume } };
                self.actions.push(action);
            }
            Machine::Ready { link, work, .. } => {
                *link = Link::Up;
                if let Work::Turn(turn) = work {
                    let turn = turn.clone();
                    self.compare(&turn, status);
                }
                self.save();
            }
            _ => {}
        }
    }

    /// What the supervisor knows of the dispatched prompt decides whether it is sent again.
    pub(super) fn compare(&mut self, turn: &Turn, status: &Status) {
        let known =
            status.prompts.iter().find(|(prompt, _)| *prompt == turn.prompt).map(|(_, how)| *how);
        match known {
            None if turn.stopping.is_some() => {
                self.turn_finished(
                    TurnOutcome::Stopped,
                    Some("it was stopped before it began".to_owned()),
                );
            }
            None => self.actions.push(Action::Send {
                prompt: turn.prompt.clone(),
                turn: turn.turn.clone(),
                number: turn.number,
            }),
            Some(PromptProgress::Ended) => self.accepted(&turn.prompt),
            Some(PromptProgress::Running) => {
                self.accepted(&turn.prompt);
                if turn.stopping.is_some() {
                    self.actions.push(Action::StopTurn { turn: turn.turn.clone() });
                } else if let Some(Asked { request, answer: Some(prompt) }) = &turn.asked {
                    self.actions
                        .push(Action::Answer { request: request.clone(), prompt: prompt.clone() });
                }
            }
        }
    }

    pub(super) fn link_lost(&mut self) {
        if let Machine::Booting { link, .. } | Machine::Ready { link, .. } = &mut self.state.machine
            && *link == Link::Up
        {
            *link = Link::Down { since: self.moment.now };
        }
    }

    pub(super) fn boot_ready(&mut self) {
        if let Machine::Booting { booted, .. } = &mut self.state.machine
            && !*booted
        {
            *booted = true;
            self.actions.push(Action::Prepare);
        }
    }

    /// A boot that failed fast is tried again, as a start is. One that took long is not: so slow that
    /// three of them would not fail within the breaker's time, it would be tried for ever.
    pub(super) fn boot_failed(&mut self, reason: &str, detail: String) {
        let Machine::Booting { since, .. } = &self.state.machine else { return };
        let clocks = self.moment.clocks;
        let tries = u32::try_from(clocks.breaker_failures.max(1)).unwrap_or(u32::MAX);
        // Half of its share: starting and ending the sandboxes takes time, too.
        let slow = self.moment.now.since(*since) >= clocks.breaker / tries.saturating_mul(2);
        self.failed_to_start(reason, detail, slow);
    }

    pub(super) fn prepared(&mut self) {
        if let Machine::Booting { sandbox, link, booted: true, .. } = &self.state.machine {
            let (sandbox, link, now) = (sandbox.clone(), *link, self.moment.now);
            self.state.machine = Machine::Ready {
                sandbox,
                link,
                born: now,
                work: Work::Idle { since: now, still: Still::Awake },
            };
            self.state.wake = false;
        }
    }

    pub(super) fn accepted(&mut self, prompt: &PromptId) {
        if let Machine::Ready { work: Work::Turn(turn), .. } = &mut self.state.machine
            && turn.prompt == *prompt
        {
            turn.accepted = true;
            self.state.conversed = true;
            self.state.failures.clear();
        }
    }

    /// Who takes this prompt not takes none after it, as when its agent cannot be kept running: the next one
    /// gets another sandbox, with the same files.
    pub(super) fn refused(&mut self, prompt: &PromptId, detail: String) {
        if self.state.turn().is_some_and(|turn| turn.prompt == *prompt)
            && let Some(turn) = self.take_turn()
        {
            let id = turn.turn.clone();
            self.turn_over(turn, TurnOutcome::Failed, Some(detail));
            self.end_kept(SnapshotKind::Pause, Some(id), "prompt_refused");
        }
    }

    pub(super) fn turn_ended(&mut self, prompt: &PromptId, outcome: TurnOutcome) {
        if self.state.turn().is_some_and(|turn| turn.prompt == *prompt) {
            self.accepted(prompt);
            self.turn_finished(outcome, None);
        }
    }

    pub(super) fn request_opened(&mut self, request: String) {
        if let Machine::Ready { work: Work::Turn(turn), .. } = &mut self.state.machine {
            // A prompt bound to an older question did not reach it: it waits like any other.
            if let Some(Asked { answer: Some(prompt), .. }) =
                turn.asked.replace(Asked { request, answer: None })
            {
                self.state.queue.push_front(prompt);
            }
        }
    }

    pub(super) fn request_closed(&mut self, request: &str, answered: bool) {
        let Machine::Ready { work: Work::Turn(turn), .. } = &mut self.state.machine else { return };
        let Some(asked) = turn.asked.take_if(|asked| asked.request == request) else { return };
        match asked.answer {
            Some(prompt) if answered => {
                self.mark(prompt, PromptStatus::Queued, PromptStatus::Completed)
            }
            Some(prompt) => self.state.queue.push_front(prompt),
            None => {}
        }
    }
}
