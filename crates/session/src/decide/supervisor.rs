//! Reports of the supervisor inside the sandbox.

use harvest_proto::{
    PromptId, StateReason, TurnReason,
    api::PromptStatus,
    bridge::{BootStart, PromptProgress, Status},
    event::{SnapshotKind, TurnOutcome},
};

use super::{Action, Activity, LinkState, Question, SandboxState, Turn, decider::Decider};

impl Decider<'_> {
    pub(super) fn link_up(&mut self, status: &Status) {
        match &mut self.state.sandbox {
            SandboxState::Booting { link, start, booted, .. } => {
                *link = LinkState::Up;
                let resume = *start == BootStart::Restore && self.state.has_conversation;
                let action =
                    if *booted { Action::Prepare } else { Action::Boot { start: *start, resume } };
                self.actions.push(action);
            }
            SandboxState::Ready { link, activity, .. } => {
                *link = LinkState::Up;
                if let Activity::Turn(turn) = activity {
                    let turn = turn.clone();
                    self.resend_if_unknown(&turn, status);
                }
                self.start_capture();
            }
            _ => {}
        }
    }

    /// Sends the dispatched prompt again unless the supervisor has seen it.
    pub(super) fn resend_if_unknown(&mut self, turn: &Turn, status: &Status) {
        let known = status.prompts.iter().find(|(prompt, _)| *prompt == turn.prompt);
        match known.map(|(_, progress)| *progress) {
            None if turn.stopping.is_some() => {
                let error = Some("stopped before the turn started".to_owned());
                self.turn_finished(TurnOutcome::Stopped, Some(turn.stop_reason()), error);
            }
            None => self.actions.push(Action::SendPrompt {
                prompt: turn.prompt.clone(),
                turn: turn.turn.clone(),
                number: turn.number,
            }),
            Some(PromptProgress::Ended) => self.prompt_accepted(&turn.prompt),
            Some(PromptProgress::Running) => {
                self.prompt_accepted(&turn.prompt);
                if turn.stopping.is_some() {
                    self.actions.push(Action::StopTurn { turn: turn.turn.clone() });
                } else if let Some(Question { request, answer: Some(prompt) }) = &turn.question {
                    self.actions
                        .push(Action::Answer { request: request.clone(), prompt: prompt.clone() });
                }
            }
        }
    }

    pub(super) fn link_lost(&mut self) {
        if let SandboxState::Booting { link, .. } | SandboxState::Ready { link, .. } =
            &mut self.state.sandbox
            && *link == LinkState::Up
        {
            *link = LinkState::Down { since: self.context.now };
        }
    }

    pub(super) fn boot_ready(&mut self) {
        if let SandboxState::Booting { booted, .. } = &mut self.state.sandbox
            && !*booted
        {
            *booted = true;
            self.actions.push(Action::Prepare);
        }
    }

    /// A boot that failed is retried, as a start is, unless it would fail in the same way again.
    /// The breaker's window grows with the boot: three slow ones would not fit it, so the retries
    /// would never end.
    pub(super) fn boot_failed(&mut self, reason: StateReason, detail: String, permanent: bool) {
        let SandboxState::Booting { since, .. } = &self.state.sandbox else { return };
        let timeouts = self.context.timeouts;
        let tries = u32::try_from(timeouts.breaker_failures.max(1)).unwrap_or(u32::MAX);
        // Twice as long: starting and stopping the sandboxes takes time, too.
        let all_tries = self.context.now.since(*since).saturating_mul(tries.saturating_mul(2));
        self.failed_to_start(reason, detail, permanent, timeouts.breaker.max(all_tries));
    }

    pub(super) fn prepared(&mut self) {
        if let SandboxState::Booting { sandbox, link, booted: true, .. } = &self.state.sandbox {
            let (sandbox, link, activity) = (sandbox.clone(), *link, self.idle_now());
            let ready_since = self.context.now;
            self.state.sandbox = SandboxState::Ready { sandbox, link, ready_since, activity };
            self.state.start_requested = false;
        }
    }

    pub(super) fn prompt_accepted(&mut self, prompt: &PromptId) {
        // A stop that overtook its prompt had no effect.
        if let Some(turn) = self.state.turn()
            && turn.prompt == *prompt
            && turn.stopping.is_some()
            && !turn.prompt_accepted
        {
            self.actions.push(Action::StopTurn { turn: turn.turn.clone() });
        }
        self.mark_accepted(prompt);
        self.hand_over();
    }

    fn mark_accepted(&mut self, prompt: &PromptId) {
        if let SandboxState::Ready { activity: Activity::Turn(turn), .. } = &mut self.state.sandbox
            && turn.prompt == *prompt
        {
            (turn.prompt_accepted, turn.failed_checks) = (true, None);
            self.state.has_conversation = true;
            self.state.syncs.note = None;
            self.state.start_failures.clear();
        }
    }

    /// A supervisor that refuses one prompt refuses all later ones, as when its agent keeps
    /// crashing: stop this sandbox; the next prompt gets a new one with the same files.
    pub(super) fn prompt_refused(&mut self, prompt: &PromptId, detail: String) {
        if self.state.turn().is_some_and(|turn| turn.prompt == *prompt)
            && let Some(turn) = self.take_turn()
        {
            let id = turn.turn.clone();
            let reason = Some(TurnReason::PromptRefused);
            self.record_turn_end(turn, TurnOutcome::Failed, reason, Some(detail));
            self.stop_and_save(SnapshotKind::Pause, Some(id), StateReason::PromptRefused.into());
        }
    }

    pub(super) fn turn_ended(
        &mut self,
        prompt: &PromptId,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
    ) {
        if self.state.turn().is_some_and(|turn| turn.prompt == *prompt) {
            // Not handed over: the sandbox must not be frozen while its disk is captured.
            self.mark_accepted(prompt);
            self.turn_finished(outcome, reason, None);
        }
    }

    pub(super) fn request_opened(&mut self, request: String) {
        if let SandboxState::Ready { activity: Activity::Turn(turn), .. } = &mut self.state.sandbox
        {
            // An answer to an older question did not arrive: it becomes an ordinary queued prompt.
            if let Some(Question { answer: Some(prompt), .. }) =
                turn.question.replace(Question { request, answer: None })
            {
                self.state.queue.push_front(prompt);
            }
        }
    }

    pub(super) fn request_closed(&mut self, request: &str, answered: bool) {
        let SandboxState::Ready { activity: Activity::Turn(turn), .. } = &mut self.state.sandbox
        else {
            return;
        };
        let Some(question) = turn.question.take_if(|question| question.request == request) else {
            return;
        };
        match question.answer {
            Some(prompt) if answered => {
                self.set_prompt_status(prompt, PromptStatus::Queued, PromptStatus::Completed)
            }
            Some(prompt) => self.state.queue.push_front(prompt),
            None => {}
        }
    }
}
