//! One decision: an input changes the state, then the session advances as far as it can by itself.

use std::mem;

use harvest_proto::{
    PromptId, StateReason, TurnId, TurnReason,
    api::{PromptStatus, SessionState},
    event::{SnapshotKind, TurnOutcome},
};

use super::{
    Action, Activity, Decision, DiskOnStop, EndingTurn, FreezeState, Input, LinkState, Mode,
    PublicState, Question, SandboxState, State, StepContext, StopReason, StopSave, Turn, TurnSave,
};
use crate::timeouts::millis;

pub(super) struct Decider<'a> {
    pub(super) state: State,
    pub(super) actions: Vec<Action>,
    pub(super) context: &'a StepContext<'a>,
    /// The session has a slot, and keeps it if its next sandbox starts within this decision.
    pub(super) has_slot: bool,
}

impl<'a> Decider<'a> {
    pub(super) fn new(state: State, context: &'a StepContext<'a>) -> Self {
        let has_slot = state.sandbox != SandboxState::Absent && !state.yielding_slot;
        Self { state, actions: Vec::new(), context, has_slot }
    }

    pub(super) fn apply(&mut self, input: Input) {
        match input {
            Input::PromptQueued { prompt, now } => self.prompt_queued(prompt, now),
            Input::PromptCancelled { prompt } => self.prompt_cancelled(&prompt),
            Input::PromptMoved { prompt, position } => self.prompt_moved(prompt, position),
            Input::Stop => self.stop(),
            Input::Pause => self.pause(StateReason::Paused),
            Input::Terminate => self.terminate(),
            Input::Archive => self.archive(),
            Input::Resume => self.resume(),
            Input::Restore { snapshot, turn } => self.restore(snapshot, turn),
            Input::Suspend => self.suspend(),
            Input::SlotGranted { sequence } => self.slot_granted(sequence),
            Input::SlotQueued { sequence, limit, position } => {
                self.slot_queued(sequence, limit, position)
            }
            Input::SlotReleaseRequested => self.slot_release_requested(),
            Input::PromptAccepted { prompt } => self.prompt_accepted(&prompt),
            Input::PromptRefused { prompt, detail } => self.prompt_refused(&prompt, detail),
            Input::TurnEnded { prompt, outcome, reason } => {
                self.turn_ended(&prompt, outcome, reason)
            }
            Input::RequestOpened { request } => self.request_opened(request),
            Input::RequestClosed { request, answered } => self.request_closed(&request, answered),
            Input::Blocked => self.state.blocked = self.state.turn().is_some(),
            Input::SyncEnded { checkouts } => self.sync_ended(&checkouts),
            Input::Captured { snapshot, millis } => self.captured(&snapshot, millis),
            Input::CaptureUnsupported { snapshot } => self.capture_unsupported(&snapshot),
            Input::CaptureFailed { snapshot, detail } => self.capture_failed(&snapshot, detail),
            Input::StoppedAndSaved { snapshot, millis } => {
                self.stopped_and_saved(&snapshot, millis)
            }
            Input::StopSaveFailed { snapshot, detail, found } => {
                self.stop_save_failed(&snapshot, detail, found.as_ref())
            }
            Input::Reviewed { failed_checks } => self.state.failed_checks = failed_checks,
            Input::Touched => self.touched(),
            Input::Tick => self.tick(),
            input => self.apply_sandbox_input(input),
        }
    }

    /// Reports about a sandbox; those about an earlier one are ignored.
    fn apply_sandbox_input(&mut self, input: Input) {
        let current = self.state.epoch;
        match input {
            Input::Started { epoch, start } if epoch == current => self.started(start),
            Input::StartFailed { epoch, detail, cause } if epoch == current => {
                if matches!(self.state.sandbox, SandboxState::Starting { .. }) {
                    self.start_failed(detail, cause);
                }
            }
            Input::FoundRunning { epoch } if epoch == current => self.found_running(),
            Input::FoundGone { epoch } if epoch == current => self.sandbox_gone(),
            Input::SandboxEnded { epoch, reason } if epoch == current => self.sandbox_lost(&reason),
            Input::LinkUp { epoch, status } if epoch == current => self.link_up(&status),
            Input::LinkLost { epoch } if epoch == current => self.link_lost(),
            Input::BootReady { epoch } if epoch == current => self.boot_ready(),
            Input::BootFailed { epoch, detail, permanent } if epoch == current => {
                self.boot_failed(StateReason::BootFailed, detail, permanent)
            }
            Input::Prepared { epoch } if epoch == current => self.prepared(),
            Input::Discarded { epoch } if epoch == current => self.discarded(),
            Input::Frozen { epoch } if epoch == current => self.frozen(),
            Input::FreezeFailed { epoch } if epoch == current => self.freeze_failed(),
            Input::Thawed { epoch } if epoch == current => self.thawed(),
            _ => {}
        }
    }

    /// Does what the session does by itself in its new state.
    pub(super) fn advance(&mut self) {
        if self.state.mode == Mode::Archived {
            for prompt in mem::take(&mut self.state.queue) {
                self.set_prompt_status(prompt, PromptStatus::Queued, PromptStatus::Cancelled);
            }
        }
        self.apply_restore();
        self.pause_if_suspending();
        let active = self.state.mode == Mode::Active;
        let wanted = self.state.start_requested || !self.state.queue.is_empty();
        match &self.state.sandbox {
            SandboxState::Absent if active && wanted => self.start_or_wait(),
            SandboxState::Absent => self.state.waiting = None,
            _ if !active || self.state.restoring.is_some() => self.wind_down(),
            SandboxState::Ready {
                link: LinkState::Up, activity: Activity::Idle { .. }, ..
            } if wanted => self.use_idle_sandbox(),
            _ => {}
        }
        if self.state.sandbox == SandboxState::Absent {
            self.state.yielding_slot = false;
        }
    }

    /// Stops the sandbox: its turn first, then the sandbox itself, whose disk is saved.
    fn wind_down(&mut self) {
        let reason = match self.state.restoring {
            Some(_) => StateReason::Restored,
            None => self.pause_reason(),
        };
        match &self.state.sandbox {
            SandboxState::Booting { .. } => self.stop_and_discard(reason.into()),
            SandboxState::Ready {
                activity: Activity::Idle { .. } | Activity::SaveFailed { .. },
                ..
            } => {
                let turn = self.state.saved_turn().cloned();
                self.stop_and_save(SnapshotKind::Pause, turn, reason.into());
            }
            SandboxState::Ready { activity: Activity::Turn(_), .. } => self.request_turn_stop(),
            _ => {}
        }
    }

    /// Prompts are queued and the sandbox is idle: dispatches the next one, or thaws or replaces
    /// the sandbox first.
    fn use_idle_sandbox(&mut self) {
        let SandboxState::Ready { ready_since, activity: Activity::Idle { freeze, .. }, .. } =
            &self.state.sandbox
        else {
            return;
        };
        let old = self.context.now.since(*ready_since) >= self.context.timeouts.lifetime;
        match freeze {
            _ if self.state.queue.is_empty() => {}
            // A turn could outlast the lifetime by hours: the next one gets a new sandbox.
            _ if old && !self.context.busy => {
                self.stop_and_save(SnapshotKind::Pause, None, StateReason::Lifetime.into())
            }
            FreezeState::Running | FreezeState::FreezeFailed => self.dispatch(),
            FreezeState::Freezing | FreezeState::Frozen => self.thaw(),
            FreezeState::Thawing { .. } => {}
        }
    }

    pub(super) fn start(&mut self) {
        self.state.waiting = None;
        let sandbox = self.context.sandbox.clone();
        self.state.epoch += 1;
        self.actions.push(Action::Start {
            sandbox: sandbox.clone(),
            epoch: self.state.epoch,
            from: self.state.latest_snapshot.clone(),
        });
        self.state.sandbox = SandboxState::Starting { sandbox, since: self.context.now };
    }

    fn dispatch(&mut self) {
        let Some(prompt) = self.state.queue.pop_front() else { return };
        let SandboxState::Ready { activity, .. } = &mut self.state.sandbox else { return };
        self.state.turns += 1;
        (self.state.blocked, self.state.over_budget) = (false, false);
        self.state.syncs.conflict = false;
        let (turn, number) = (self.context.turn.clone(), self.state.turns);
        *activity = Activity::Turn(Turn {
            prompt: prompt.clone(),
            turn: turn.clone(),
            number,
            since: self.context.now,
            failed_checks: self.state.failed_checks.take(),
            prompt_accepted: false,
            stopping: None,
            overdue: false,
            question: None,
            handed_over: None,
        });
        self.set_prompt_status(prompt.clone(), PromptStatus::Queued, PromptStatus::Dispatched);
        self.actions.push(Action::TurnStarted {
            turn: turn.clone(),
            number,
            prompt: prompt.clone(),
        });
        self.actions.push(Action::SendPrompt { prompt, turn, number });
    }

    /// Stops the turn in progress. No prompt is sent before it has ended.
    pub(super) fn request_turn_stop(&mut self) {
        if let SandboxState::Ready { link, activity: Activity::Turn(turn), .. } =
            &mut self.state.sandbox
            && turn.stopping.is_none()
        {
            turn.stopping = Some(self.context.now);
            if *link == LinkState::Up {
                self.actions.push(Action::StopTurn { turn: turn.turn.clone() });
            }
        }
    }

    pub(super) fn set_prompt_status(
        &mut self,
        prompt: PromptId,
        from: PromptStatus,
        to: PromptStatus,
    ) {
        self.actions.push(Action::SetPromptStatus { prompt, from, to });
    }

    pub(super) fn fail(&mut self, reason: StateReason, detail: String) {
        if matches!(self.state.mode, Mode::Active | Mode::Failed { .. }) {
            self.state.mode = Mode::Failed { reason, detail };
        }
        self.state.start_requested = false;
    }

    pub(super) fn pause_reason(&self) -> StateReason {
        match &self.state.mode {
            Mode::Active => StateReason::Paused,
            Mode::Paused { reason } | Mode::Failed { reason, .. } => *reason,
            Mode::Archived => StateReason::Archived,
        }
    }

    pub(super) fn stop_and_discard(&mut self, reason: StopReason) {
        if let SandboxState::Starting { sandbox, .. } | SandboxState::Booting { sandbox, .. } =
            &self.state.sandbox
        {
            let sandbox = sandbox.clone();
            self.actions.push(Action::StopAndDiscard { sandbox: sandbox.clone() });
            self.state.sandbox =
                SandboxState::Stopping { sandbox, disk: DiskOnStop::Discard, reason };
        }
    }

    pub(super) fn stop_and_save(
        &mut self,
        kind: SnapshotKind,
        turn: Option<TurnId>,
        reason: StopReason,
    ) {
        let Some(sandbox) = self.state.sandbox_id().cloned() else { return };
        // Whether this snapshot exists is unknown, and no capture of it will be tried again.
        if let SandboxState::Ready {
            activity:
                Activity::SaveFailed { save, .. }
                | Activity::Saving(save @ TurnSave { deferred: true, .. }),
            ..
        } = &self.state.sandbox
        {
            self.actions.push(Action::RemoveSnapshot { snapshot: save.snapshot.clone() });
        }
        let snapshot = self.context.snapshot.clone();
        self.actions.push(Action::StopAndSave {
            sandbox: sandbox.clone(),
            snapshot: snapshot.clone(),
            kind,
        });
        let disk = DiskOnStop::Save(StopSave { snapshot, kind, turn, ending: None });
        self.state.sandbox = SandboxState::Stopping { sandbox, disk, reason };
    }

    /// The sandbox stops at once. A turn in progress ends with it, and not before: until then its
    /// processes may run.
    pub(super) fn stop_abruptly(
        &mut self,
        outcome: TurnOutcome,
        why: TurnReason,
        error: &str,
        reason: StopReason,
    ) {
        let mut last_turn = self.state.saved_turn().cloned();
        let ending = self.take_turn().map(|mut turn| {
            last_turn = Some(turn.turn.clone());
            self.requeue_answer(&mut turn);
            Box::new(EndingTurn { turn, outcome, reason: why, error: error.to_owned() })
        });
        self.stop_and_save(SnapshotKind::Recovered, last_turn, reason);
        if let SandboxState::Stopping { disk: DiskOnStop::Save(save), .. } = &mut self.state.sandbox
        {
            save.ending = ending;
        }
    }

    /// The processes of the sandbox are gone: stores the end of the turn that ended with it.
    pub(super) fn record_ending(&mut self, ending: Option<Box<EndingTurn>>) {
        if let Some(ending) = ending {
            let EndingTurn { turn, outcome, reason, error } = *ending;
            self.record_turn_end(turn, outcome, Some(reason), Some(error));
        }
    }

    /// The answer never arrived: it becomes an ordinary queued prompt.
    fn requeue_answer(&mut self, turn: &mut Turn) {
        if let Some(Question { answer: Some(prompt), .. }) = turn.question.take() {
            self.state.queue.push_front(prompt);
        }
    }

    /// Nothing is left of the sandbox.
    pub(super) fn sandbox_ended(&mut self, reason: String) {
        if let Some(sandbox) = self.state.sandbox_id().cloned() {
            self.actions.push(Action::SandboxEnded { sandbox, reason });
            self.state.sandbox = SandboxState::Absent;
        }
    }

    /// A sandbox that has just become idle.
    pub(super) const fn idle_now(&self) -> Activity {
        Activity::Idle { since: self.context.now, freeze: FreezeState::Running }
    }

    /// The turn ended and the sandbox keeps running: its state is saved before the next prompt.
    pub(super) fn turn_finished(
        &mut self,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
        error: Option<String>,
    ) {
        let Some(turn) = self.take_turn() else { return };
        let (snapshot, id) = (self.context.snapshot.clone(), turn.turn.clone());
        self.record_turn_end(turn, outcome, reason, error);
        if let SandboxState::Ready { activity, .. } = &mut self.state.sandbox {
            *activity = Activity::Saving(TurnSave { snapshot, turn: id, deferred: true });
        }
        self.start_capture();
    }

    /// Starts a deferred capture once the bridge is up. After a restart this may be the second
    /// capture of the same snapshot: how far the first one came is unknown.
    pub(super) fn start_capture(&mut self) {
        if let SandboxState::Ready {
            sandbox,
            link: LinkState::Up,
            activity: Activity::Saving(save),
            ..
        } = &mut self.state.sandbox
            && save.deferred
        {
            save.deferred = false;
            self.actions.push(Action::Capture {
                sandbox: sandbox.clone(),
                snapshot: save.snapshot.clone(),
            });
        }
    }

    pub(super) fn take_turn(&mut self) -> Option<Turn> {
        let idle = self.idle_now();
        let SandboxState::Ready { activity, .. } = &mut self.state.sandbox else { return None };
        match mem::replace(activity, idle) {
            Activity::Turn(turn) => Some(turn),
            other => {
                *activity = other;
                None
            }
        }
    }

    pub(super) fn record_turn_end(
        &mut self,
        mut turn: Turn,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
        error: Option<String>,
    ) {
        let to = match outcome {
            TurnOutcome::Completed => PromptStatus::Completed,
            TurnOutcome::Failed => PromptStatus::Failed,
            TurnOutcome::Stopped => PromptStatus::Stopped,
            TurnOutcome::Interrupted => PromptStatus::Interrupted,
        };
        self.requeue_answer(&mut turn);
        self.state.over_budget = reason == Some(TurnReason::Budget);
        self.set_prompt_status(turn.prompt.clone(), PromptStatus::Dispatched, to);
        self.actions.push(Action::TurnEnded {
            turn: turn.turn,
            prompt: turn.prompt,
            outcome,
            reason,
            error,
            millis: millis(self.context.now.since(turn.since)),
        });
    }

    pub(super) fn finish(mut self) -> Decision {
        let (public, detail) = self.public_state();
        if public != self.state.public {
            let PublicState { state, reason } = public.clone();
            self.actions.push(Action::SetPublicState { state, reason, detail });
            self.state.public = public;
        }
        Decision { state: self.state, actions: self.actions }
    }

    fn public_state(&self) -> (PublicState, Option<String>) {
        let show = |state, reason| (PublicState { state, reason }, None);
        let with =
            |state, reason, detail: &str| (PublicState { state, reason }, Some(detail.to_owned()));
        match &self.state.sandbox {
            SandboxState::Starting { .. } | SandboxState::Booting { .. } => {
                show(SessionState::Starting, StateReason::Sandbox)
            }
            SandboxState::Ready { activity, .. } => match activity {
                Activity::Idle { .. } if self.state.syncs.conflict => {
                    show(SessionState::NeedsInput, StateReason::Conflict)
                }
                Activity::Idle { .. } if self.state.blocked => {
                    show(SessionState::NeedsInput, StateReason::Blocked)
                }
                Activity::Idle { .. } if self.state.over_budget => {
                    show(SessionState::NeedsInput, StateReason::Budget)
                }
                Activity::Idle { freeze: FreezeState::Frozen, .. } => {
                    show(SessionState::Idle, StateReason::Frozen)
                }
                Activity::Idle { .. } => show(SessionState::Idle, StateReason::Ready),
                Activity::Turn(Turn { question: Some(Question { answer: None, .. }), .. }) => {
                    show(SessionState::NeedsInput, StateReason::Question)
                }
                Activity::Turn(_) | Activity::Saving(_) => {
                    show(SessionState::Running, StateReason::Turn)
                }
                Activity::SaveFailed { detail, .. } => {
                    with(SessionState::Failed, StateReason::SaveUnknown, detail)
                }
            },
            SandboxState::SaveUnknown { detail, .. } => {
                with(SessionState::Failed, StateReason::SaveUnknown, detail)
            }
            SandboxState::Stopping { .. } => (self.state.public.clone(), None),
            SandboxState::Absent => match &self.state.mode {
                Mode::Active
                    if let Some(waiting) = self.state.waiting.filter(|_| !self.state.is_new()) =>
                {
                    let limit = waiting.limit;
                    with(SessionState::Queued, limit.reason(), &limit.describe())
                }
                Mode::Paused { reason } => show(SessionState::Paused, *reason),
                Mode::Failed { reason, detail } => with(SessionState::Failed, *reason, detail),
                Mode::Archived => show(SessionState::Archived, StateReason::Archived),
                Mode::Active if self.state.epoch == 0 => {
                    show(SessionState::Queued, StateReason::Created)
                }
                Mode::Active => show(SessionState::Paused, StateReason::Paused),
            },
        }
    }
}
