//! One step: an input changes the state, then the session advances as far as it can by itself.

use std::mem;

use harvest_proto::{
    PromptId, TurnId,
    api::{PromptStatus, SessionState},
    event::{SnapshotKind, TurnOutcome},
};

use super::{
    Action, Asked, Ending, Input, Keep, Link, Machine, Moment, Rest, Save, Shown, State, Step,
    Still, Turn, Work,
};

pub(super) struct Deciding<'a> {
    pub(super) state: State,
    pub(super) actions: Vec<Action>,
    pub(super) moment: &'a Moment<'a>,
    /// The session has a place, and may keep it if it goes straight on.
    pub(super) place: bool,
}

impl<'a> Deciding<'a> {
    pub(super) fn new(state: State, moment: &'a Moment<'a>) -> Self {
        let place = state.machine != Machine::Absent && !state.ceding;
        Self { state, actions: Vec::new(), moment, place }
    }

    pub(super) fn take(&mut self, input: Input) {
        match input {
            Input::Queued { prompt, now } => self.queued(prompt, now),
            Input::Cancelled { prompt } => self.cancelled(&prompt),
            Input::Moved { prompt, position } => self.moved(prompt, position),
            Input::Stop => self.stop(),
            Input::Pause => self.rest("paused"),
            Input::Terminate => self.terminate(),
            Input::Archive => self.archive(),
            Input::Resume => self.resume(),
            Input::Restore { snapshot, turn } => self.restore(snapshot, turn),
            Input::Suspend => self.suspend(),
            Input::PlaceGiven { ticket } => self.place_given(ticket),
            Input::PlaceMoved { ticket, limit, position } => {
                self.place_moved(ticket, limit, position)
            }
            Input::PlaceNeeded => self.place_needed(),
            Input::Accepted { prompt } => self.accepted(&prompt),
            Input::Refused { prompt, detail } => self.refused(&prompt, detail),
            Input::TurnEnded { prompt, outcome } => self.turn_ended(&prompt, outcome),
            Input::RequestOpened { request } => self.request_opened(request),
            Input::RequestClosed { request, answered } => self.request_closed(&request, answered),
            Input::Saved { snapshot, millis } => self.saved(&snapshot, millis),
            Input::CannotSave { snapshot } => self.cannot_save(&snapshot),
            Input::SaveFailed { snapshot, detail } => self.save_failed(&snapshot, detail),
            Input::Kept { snapshot, millis } => self.kept(&snapshot, millis),
            Input::KeepFailed { snapshot, detail, gone } => {
                self.keep_failed(&snapshot, detail, gone)
            }
            Input::Touched => self.touched(),
            Input::Tick => self.tick(),
            of_a_sandbox => self.take_from_sandbox(of_a_sandbox),
        }
    }

    /// Words about a sandbox; those about an earlier one are not heard.
    fn take_from_sandbox(&mut self, input: Input) {
        let current = self.state.epoch;
        match input {
            Input::Started { epoch, start } if epoch == current => self.started(start),
            Input::StartFailed { epoch, detail, permanent } if epoch == current => {
                if matches!(self.state.machine, Machine::Starting { .. }) {
                    self.start_failed(detail, permanent);
                }
            }
            Input::FoundRunning { epoch } if epoch == current => self.found_running(),
            Input::FoundGone { epoch } if epoch == current => self.gone(),
            Input::SandboxEnded { epoch, reason } if epoch == current => self.lost(&reason),
            Input::LinkUp { epoch, status } if epoch == current => self.link_up(&status),
            Input::LinkLost { epoch } if epoch == current => self.link_lost(),
            Input::BootReady { epoch } if epoch == current => self.boot_ready(),
            Input::BootFailed { epoch, detail } if epoch == current => {
                self.boot_failed("boot_failed", detail)
            }
            Input::Prepared { epoch } if epoch == current => self.prepared(),
            Input::Discarded { epoch } if epoch == current => self.discarded(),
            Input::Froze { epoch } if epoch == current => self.froze(),
            Input::FreezeFailed { epoch } if epoch == current => self.freeze_failed(),
            Input::Thawed { epoch } if epoch == current => self.thawed(),
            _ => {}
        }
    }

    // What the session does by itself.

    pub(super) fn advance(&mut self) {
        if self.state.rest == Rest::Archived {
            for prompt in mem::take(&mut self.state.queue) {
                self.mark(prompt, PromptStatus::Queued, PromptStatus::Cancelled);
            }
        }
        self.put_back();
        let open = self.state.rest == Rest::Open;
        let wanted = self.state.wake || !self.state.queue.is_empty();
        match &self.state.machine {
            Machine::Absent if open && wanted => self.start_or_wait(),
            Machine::Absent => self.state.waiting = None,
            _ if !open || self.state.restoring.is_some() => self.leave(),
            Machine::Ready { link: Link::Up, work: Work::Idle { .. }, .. } if wanted => {
                self.go_on()
            }
            _ => {}
        }
        if self.state.machine == Machine::Absent {
            self.state.ceding = false;
        }
    }

    /// The machine is to go; what it does is ended first, and what it holds is kept.
    fn leave(&mut self) {
        let reason = match self.state.restoring {
            Some(_) => "restore".to_owned(),
            None => self.rest_reason(),
        };
        match &self.state.machine {
            Machine::Booting { .. } => self.discard(&reason),
            Machine::Ready { work: Work::Idle { .. }, .. } => {
                self.end_kept(SnapshotKind::Pause, None, &reason);
            }
            Machine::Ready { work: Work::Unsaved { save, .. }, .. } => {
                let turn = Some(save.turn.clone());
                self.end_kept(SnapshotKind::Pause, turn, &reason);
            }
            Machine::Ready { work: Work::Turn(_), .. } => self.fence(),
            _ => {}
        }
    }

    /// Something waits and the machine could do it.
    fn go_on(&mut self) {
        let Machine::Ready { born, work: Work::Idle { still, .. }, .. } = &self.state.machine
        else {
            return;
        };
        let old = self.moment.now.since(*born) >= self.moment.clocks.lifetime;
        match still {
            _ if self.state.queue.is_empty() => {}
            // The next turn is another sandbox's: this one would outlive its time by a whole turn.
            _ if old && !self.moment.busy => self.end_kept(SnapshotKind::Pause, None, "lifetime"),
            Still::Awake | Still::Restless => self.dispatch(),
            Still::Freezing | Still::Frozen => self.thaw(),
            Still::Thawing { .. } => {}
        }
    }

    pub(super) fn start(&mut self) {
        self.state.waiting = None;
        let sandbox = self.moment.sandbox.clone();
        self.state.epoch += 1;
        self.actions.push(Action::Start {
            sandbox: sandbox.clone(),
            epoch: self.state.epoch,
            from: self.state.disk.clone(),
        });
        self.state.machine = Machine::Starting { sandbox, since: self.moment.now };
    }

    fn dispatch(&mut self) {
        let Some(prompt) = self.state.queue.pop_front() else { return };
        let Machine::Ready { work, .. } = &mut self.state.machine else { return };
        self.state.turns += 1;
        let (turn, number) = (self.moment.turn.clone(), self.state.turns);
        *work = Work::Turn(Turn {
            prompt: prompt.clone(),
            turn: turn.clone(),
            number,
            since: self.moment.now,
            accepted: false,
            stopping: None,
            asked: None,
        });
        self.mark(prompt.clone(), PromptStatus::Queued, PromptStatus::Dispatched);
        self.actions.push(Action::TurnBegun { turn: turn.clone(), number, prompt: prompt.clone() });
        self.actions.push(Action::Send { prompt, turn, number });
    }

    /// The turn is being stopped: nothing is sent before it is over.
    pub(super) fn fence(&mut self) {
        if let Machine::Ready { link, work: Work::Turn(turn), .. } = &mut self.state.machine
            && turn.stopping.is_none()
        {
            turn.stopping = Some(self.moment.now);
            if *link == Link::Up {
                self.actions.push(Action::StopTurn { turn: turn.turn.clone() });
            }
        }
    }

    // Pieces.

    pub(super) fn mark(&mut self, prompt: PromptId, from: PromptStatus, to: PromptStatus) {
        self.actions.push(Action::Prompt { prompt, from, to });
    }

    pub(super) fn fail(&mut self, reason: &str, detail: String) {
        if matches!(self.state.rest, Rest::Open | Rest::Failed { .. }) {
            self.state.rest = Rest::Failed { reason: reason.to_owned(), detail };
        }
        self.state.wake = false;
    }

    pub(super) fn rest_reason(&self) -> String {
        match &self.state.rest {
            Rest::Open => "paused".to_owned(),
            Rest::Paused { reason } | Rest::Failed { reason, .. } => reason.clone(),
            Rest::Archived => "archived".to_owned(),
        }
    }

    pub(super) fn discard(&mut self, reason: &str) {
        if let Machine::Starting { sandbox, .. } | Machine::Booting { sandbox, .. } =
            &self.state.machine
        {
            let sandbox = sandbox.clone();
            self.actions.push(Action::End { sandbox: sandbox.clone() });
            self.state.machine =
                Machine::Ending { sandbox, how: Ending::Discard, reason: reason.to_owned() };
        }
    }

    pub(super) fn end_kept(&mut self, kind: SnapshotKind, turn: Option<TurnId>, reason: &str) {
        let Some(sandbox) = self.state.sandbox().cloned() else { return };
        // Whether that one is there nobody knows; it will not be asked for again.
        if let Machine::Ready {
            work: Work::Unsaved { save, .. } | Work::Saving(save @ Save { later: true, .. }),
            ..
        } = &self.state.machine
        {
            self.actions.push(Action::Forget { snapshot: save.snapshot.clone() });
        }
        let snapshot = self.moment.snapshot.clone();
        self.actions.push(Action::EndKept {
            sandbox: sandbox.clone(),
            snapshot: snapshot.clone(),
            kind,
        });
        let how = Ending::Keep(Keep { snapshot, kind, turn });
        self.state.machine = Machine::Ending { sandbox, how, reason: reason.to_owned() };
    }

    /// The machine ends in the middle of a turn, and the turn with it.
    pub(super) fn end_turn_with_machine(&mut self, outcome: TurnOutcome, told: &str, reason: &str) {
        let Some(turn) = self.take_turn() else { return };
        let id = turn.turn.clone();
        self.turn_over(turn, outcome, Some(told.to_owned()));
        self.end_kept(SnapshotKind::Recovered, Some(id), reason);
    }

    /// The turn ended, the machine goes on: its state is kept before anything else.
    pub(super) fn turn_finished(&mut self, outcome: TurnOutcome, told: Option<String>) {
        let Some(turn) = self.take_turn() else { return };
        let (snapshot, id) = (self.moment.snapshot.clone(), turn.turn.clone());
        self.turn_over(turn, outcome, told);
        if let Machine::Ready { work, .. } = &mut self.state.machine {
            *work = Work::Saving(Save { snapshot, turn: id, later: true });
        }
        self.save();
    }

    /// What is to be kept is kept now, or once the machine can be spoken with. It may be kept for the second
    /// time: the first was another server's, and nobody knows how far it came.
    pub(super) fn save(&mut self) {
        if let Machine::Ready { sandbox, link: Link::Up, work: Work::Saving(save), .. } =
            &mut self.state.machine
            && save.later
        {
            save.later = false;
            self.actions.push(Action::Capture {
                sandbox: sandbox.clone(),
                snapshot: save.snapshot.clone(),
            });
        }
    }

    pub(super) fn take_turn(&mut self) -> Option<Turn> {
        let Machine::Ready { work, .. } = &mut self.state.machine else { return None };
        match mem::replace(work, Work::Idle { since: self.moment.now, still: Still::Awake }) {
            Work::Turn(turn) => Some(turn),
            other => {
                *work = other;
                None
            }
        }
    }

    pub(super) fn turn_over(&mut self, turn: Turn, outcome: TurnOutcome, told: Option<String>) {
        let to = match outcome {
            TurnOutcome::Completed => PromptStatus::Completed,
            TurnOutcome::Failed => PromptStatus::Failed,
            TurnOutcome::Stopped => PromptStatus::Stopped,
            TurnOutcome::Interrupted => PromptStatus::Interrupted,
        };
        self.mark(turn.prompt.clone(), PromptStatus::Dispatched, to);
        self.actions.push(Action::TurnOver {
            turn: turn.turn,
            prompt: turn.prompt,
            outcome,
            told,
            millis: u64::try_from(self.moment.now.since(turn.since).as_millis())
                .unwrap_or(u64::MAX),
        });
        // Its answer never arrived: it waits like any other prompt.
        if let Some(Asked { answer: Some(prompt), .. }) = turn.asked {
            self.state.queue.push_front(prompt);
        }
    }

    // What people see.

    pub(super) fn finish(mut self) -> Step {
        let (shown, detail) = self.look();
        if shown != self.state.shown {
            let Shown { state, reason } = shown.clone();
            self.actions.push(Action::Show { state, reason, detail });
            self.state.shown = shown;
        }
        Step { state: self.state, actions: self.actions }
    }

    fn look(&self) -> (Shown, Option<String>) {
        let show = |state, reason: &str| (Shown { state, reason: reason.to_owned() }, None);
        let with = |state, reason: &str, detail: &String| {
            (Shown { state, reason: reason.to_owned() }, Some(detail.clone()))
        };
        match &self.state.machine {
            Machine::Starting { .. } | Machine::Booting { .. } => {
                show(SessionState::Starting, "sandbox")
            }
            Machine::Ready { work, .. } => match work {
                Work::Idle { still: Still::Frozen, .. } => show(SessionState::Idle, "frozen"),
                Work::Idle { .. } => show(SessionState::Idle, "ready"),
                Work::Turn(Turn { asked: Some(Asked { answer: None, .. }), .. }) => {
                    show(SessionState::NeedsInput, "question")
                }
                Work::Turn(_) | Work::Saving(_) => show(SessionState::Running, "turn"),
                Work::Unsaved { detail, .. } => with(SessionState::Failed, "save_unknown", detail),
            },
            Machine::Held { detail, .. } => with(SessionState::Failed, "save_unknown", detail),
            Machine::Ending { .. } => (self.state.shown.clone(), None),
            Machine::Absent => match &self.state.rest {
                Rest::Open
                    if let Some(waiting) = self.state.waiting.filter(|_| !self.state.is_new()) =>
                {
                    with(
                        SessionState::Queued,
                        waiting.limit.as_str(),
                        &waiting.limit.words().to_owned(),
                    )
                }
                Rest::Paused { reason } => show(SessionState::Paused, reason),
                Rest::Failed { reason, detail } => with(SessionState::Failed, reason, detail),
                Rest::Archived => show(SessionState::Archived, "archived"),
                Rest::Open if self.state.epoch == 0 => show(SessionState::Queued, "created"),
                Rest::Open => show(SessionState::Paused, "paused"),
            },
        }
    }
}
