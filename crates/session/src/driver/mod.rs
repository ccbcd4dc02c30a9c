//! One task per session owns its state: it feeds `decide`, writes what is kept, then carries out the
//! rest. It awaits nothing but the store, so a session answers while its sandbox starts or is saved:
//! whatever takes time runs beside it and reports back.

mod allowed;
mod effects;
mod freezer;
mod handle;
mod link;
mod writes;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harvest_gateway::ledger::Pass;
use harvest_proto::{
    EventBody, PromptId, SandboxId, SessionId, SnapshotId, TurnId, api::SessionState,
    bridge::BootStart, event::SnapshotKind,
};
use harvest_store::{CheckoutRecord, Removal, SessionRecord, StoreError, Write};
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};

use crate::{
    bridge::Opened,
    decide::{Action, Input, Limit, Machine, Moment, Room, State, Step, Work, decide, restart},
    error::SessionError,
    provider::Started,
    removals::carry_out,
    wiring::{Shared, now, words},
};

pub(crate) use handle::{Busy, Command, Handle, Reply};

use allowed::allowed;
use link::Link;

/// What the driver's own tasks report.
pub(crate) enum Note {
    Input(Input, Vec<Write>),
    Started {
        epoch: u64,
        sandbox: SandboxId,
        start: BootStart,
        started: Started,
        writes: Vec<Write>,
    },
    FoundRunning {
        epoch: u64,
        started: Started,
    },
    Connected {
        epoch: u64,
        opened: Box<Opened>,
    },
    Pass {
        epoch: u64,
        socket: PathBuf,
        pass: Box<Pass>,
    },
    Reviewed,
}

pub(crate) struct Driver {
    shared: Arc<Shared>,
    record: SessionRecord,
    state: State,
    /// The state as the store has it.
    kept: String,
    commands: mpsc::UnboundedReceiver<Command>,
    notes: mpsc::UnboundedReceiver<Note>,
    notes_in: mpsc::UnboundedSender<Note>,
    view: watch::Sender<State>,
    execs: Arc<AtomicUsize>,
    link: Option<Link>,
    /// How long a lost connection is not dialled again.
    redial: Duration,
    door: Option<Box<dyn std::any::Any + Send>>,
    /// The tasks that only make sense while the sandbox is spoken with.
    attached: Vec<AbortHandle>,
    reviewing: Option<bool>,
    freezer: Option<freezer::Freezer>,
    /// How many commands go on by themselves in the machine, as its supervisor said last.
    detached: u32,
}

/// The driver ends: another server took over, or the session is deleted.
struct Over;

type Go = Result<(), Over>;

impl Driver {
    /// Starts driving a session from where the store says it stands. `queue` are the waiting prompts.
    pub(crate) fn spawn(
        shared: &Arc<Shared>,
        record: SessionRecord,
        queue: Vec<PromptId>,
    ) -> Result<Handle, SessionError> {
        let state: State = serde_json::from_str(&record.drive)
            .map_err(|_| StoreError::Corrupt { column: "drive" })?;
        let (commands, inbox) = mpsc::unbounded_channel();
        let (notes_in, notes) = mpsc::unbounded_channel();
        let (view, seen) = watch::channel(state.clone());
        let execs = Arc::new(AtomicUsize::new(0));
        let driver = Box::new(Self {
            shared: Arc::clone(shared),
            kept: record.drive.clone(),
            record,
            state,
            commands: inbox,
            notes,
            notes_in,
            view,
            execs: Arc::clone(&execs),
            link: None,
            redial: Duration::ZERO,
            door: None,
            attached: Vec::new(),
            reviewing: None,
            freezer: None,
            detached: 0,
        });
        let author = &driver.record.session.author.email;
        let user = driver.state.user.clone().unwrap_or_else(|| author.clone());
        shared.usher.join(driver.id(), user, &driver.state, driver.notes_in.clone());
        shared.spawn(driver.run(queue));
        Ok(Handle { commands, view: seen, execs })
    }

    /// Everything but the waiting is boxed: what acting takes is much, and gone while nothing happens.
    async fn run(mut self: Box<Self>, queue: Vec<PromptId>) {
        let step = self.at(|moment, state| restart(state, queue.clone(), moment));
        let (id, mut go) = (self.id().clone(), Box::pin(self.insist(step, Vec::new())).await);
        while go.is_ok() {
            let wake = self.next_clock();
            go = tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => Box::pin(self.command(command)).await,
                    None => Err(Over),
                },
                note = self.notes.recv() => match note {
                    Some(note) => Box::pin(self.note(note)).await,
                    None => Err(Over),
                },
                heard = link::hear(&mut self.link) => Box::pin(self.heard(heard)).await,
                () = tokio::time::sleep(wake) => Box::pin(self.input(Input::Tick)).await,
            };
        }
        tracing::debug!(session = %id, "the driver ends");
    }

    fn id(&self) -> &SessionId {
        &self.record.session.id
    }

    fn next_clock(&self) -> Duration {
        // A machine in use is looked at again later; a day is as good as for ever.
        let day = Duration::from_secs(24 * 60 * 60);
        let idle = matches!(self.state.machine, Machine::Ready { work: Work::Idle { .. }, .. });
        if idle && self.is_busy() && self.link.is_some() {
            return day;
        }
        let now = self.shared.steady.now();
        self.state.next_clock(&self.shared.config.clocks).map_or(day, |at| {
            // One millisecond more, so that the clock has struck when it is looked at.
            at.since(now) + Duration::from_millis(1)
        })
    }

    fn is_busy(&self) -> bool {
        self.execs.load(Ordering::SeqCst) > 0 || self.detached > 0
    }

    /// Decides. Only a session that would have to wait otherwise asks for a place.
    fn at(&self, judge: impl Fn(&Moment<'_>, State) -> Step) -> Step {
        let mut moment = Moment {
            now: self.shared.steady.now(),
            clocks: &self.shared.config.clocks,
            busy: self.is_busy(),
            room: Room::Full { limit: Limit::Closed, position: 0 },
            ticket: 0,
            sandbox: SandboxId::random(),
            turn: TurnId::random(),
            snapshot: SnapshotId::random(),
        };
        let step = judge(&moment, self.state.clone());
        if step.state.waiting.is_none() || self.state.waiting.is_some() {
            return step;
        }
        (moment.room, moment.ticket) = self.shared.usher.claim(self.id());
        judge(&moment, self.state.clone())
    }

    /// The usher knows how the session stands.
    fn tell(&self, answers: bool) {
        self.shared.usher.tell(self.id(), &self.state, self.is_busy(), answers);
    }

    async fn command(&mut self, command: Command) -> Go {
        match command {
            Command::Prompt { new, now, also: mut writes, reply } => {
                let input = Input::Queued { prompt: new.id.clone(), now };
                writes.push(Write::PromptInsert(new));
                self.asked(input, writes, reply).await
            }
            Command::Ask { input, reply } => self.asked(*input, Vec::new(), reply).await,
            Command::Bridge { reply } => {
                let go = self.used().await;
                let bridge = self.link.as_ref().filter(|_| self.state.is_awake());
                let _ = reply.send(bridge.map(|link| link.bridge.clone()));
                go
            }
            Command::Used => {
                self.rouse();
                self.used().await
            }
            Command::Touched => self.input(Input::Touched).await,
            Command::Delete { reply } => self.delete(reply).await,
        }
    }

    /// The machine is needed: it is awake soon, and not given away meanwhile.
    async fn used(&mut self) -> Go {
        if self.state.is_awake() || !matches!(self.state.machine, Machine::Ready { .. }) {
            self.tell(false);
            return Ok(());
        }
        self.input(Input::Touched).await
    }

    /// Somebody waits for the outcome: it is tried once, and they hear of a failure.
    async fn asked(&mut self, input: Input, writes: Vec<Write>, reply: Reply<()>) -> Go {
        if let Err(refused) = allowed(&self.state, &input) {
            let _ = reply.send(Err(refused));
            return Ok(());
        }
        let step = self.at(|moment, state| decide(state, input.clone(), moment));
        match self.attempt(&step, writes).await {
            Ok(()) => {
                let _ = reply.send(Ok(()));
                self.carry_out(step).await
            }
            Err(error) => {
                // Whatever was claimed for it is free again.
                self.tell(false);
                let over = matches!(error, StoreError::LeaseLost | StoreError::Closed);
                let _ = reply.send(Err(error.into()));
                if over { Err(Over) } else { Ok(()) }
            }
        }
    }

    async fn note(&mut self, note: Note) -> Go {
        match note {
            Note::Input(input, writes) => {
                self.learn(&writes);
                let answers = input == Input::PlaceNeeded;
                let step = self.at(|moment, state| decide(state, input.clone(), moment));
                self.insist(step, writes).await?;
                if answers {
                    self.tell(true);
                }
                Ok(())
            }
            Note::Started { epoch, sandbox, start, started, writes } => {
                let wanted = epoch == self.state.epoch
                    && matches!(self.state.machine, Machine::Starting { .. });
                if !wanted {
                    self.end_late(sandbox);
                    return Ok(());
                }
                self.meet(epoch, &started).await;
                let step =
                    self.at(|moment, state| decide(state, Input::Started { epoch, start }, moment));
                self.insist(step, writes).await
            }
            Note::FoundRunning { epoch, started } => {
                self.meet(epoch, &started).await;
                self.input(Input::FoundRunning { epoch }).await
            }
            Note::Connected { epoch, opened } => self.connected(epoch, *opened).await,
            Note::Pass { epoch, socket, pass } => {
                self.passes(epoch, &socket, *pass);
                Ok(())
            }
            Note::Reviewed => {
                if self.reviewing.take() == Some(true) {
                    self.review();
                }
                Ok(())
            }
        }
    }

    /// What our own copy of the record must know, too.
    fn learn(&mut self, writes: &[Write]) {
        for write in writes {
            match write {
                Write::BaseCommit { repository, commit } => {
                    self.checkout(repository, |known| known.base_commit = Some(commit.clone()));
                }
                Write::DefaultBase { repository, base } => {
                    self.checkout(repository, |known| {
                        known.base.get_or_insert_with(|| base.clone());
                    });
                }
                _ => {}
            }
        }
    }

    fn checkout(&mut self, repository: &str, change: impl FnOnce(&mut CheckoutRecord)) {
        let mut checkouts = self.record.checkouts.iter_mut();
        if let Some(known) = checkouts.find(|known| known.repository == repository) {
            change(known);
        }
    }

    async fn input(&mut self, input: Input) -> Go {
        let step = self.at(|moment, state| decide(state, input.clone(), moment));
        self.insist(step, Vec::new()).await
    }

    /// Nobody can be told: it is tried until it is written. A full disk stops this session here, with
    /// nothing done that is not written.
    async fn insist(&mut self, step: Step, writes: Vec<Write>) -> Go {
        let mut wait = Duration::from_millis(50);
        loop {
            match self.attempt(&step, writes.clone()).await {
                Ok(()) => return self.carry_out(step).await,
                Err(StoreError::LeaseLost | StoreError::Closed) => return Err(Over),
                Err(StoreError::NotFound { what }) => {
                    tracing::error!(session = %self.id(), what, "a session and its store disagree");
                    return Err(Over);
                }
                Err(error) => {
                    tracing::error!(session = %self.id(), %error, "a session cannot be written; trying again");
                    self.wait_out(&mut wait, &error).await;
                }
            }
        }
    }

    /// Waits before the next attempt. Who asks something meanwhile hears at once why it is not done.
    async fn wait_out(&mut self, wait: &mut Duration, error: &StoreError) {
        let until = tokio::time::Instant::now() + *wait;
        *wait = (*wait * 2).min(Duration::from_secs(10));
        while let Ok(Some(command)) = tokio::time::timeout_at(until, self.commands.recv()).await {
            let reason = match error {
                StoreError::Commit { reason } => reason.clone(),
                other => words(other),
            };
            let refused = || SessionError::from(StoreError::Commit { reason: reason.clone() });
            match command {
                Command::Prompt { reply, .. }
                | Command::Ask { reply, .. }
                | Command::Delete { reply } => {
                    let _ = reply.send(Err(refused()));
                }
                Command::Bridge { reply } => {
                    let _ = reply.send(None);
                }
                Command::Used | Command::Touched => {}
            }
        }
        tokio::time::sleep_until(until).await;
    }

    /// Writes what a step keeps, all or nothing.
    async fn attempt(&mut self, step: &Step, mut writes: Vec<Write>) -> Result<(), StoreError> {
        let at = now();
        for action in &step.actions {
            writes::of(action, at, &mut writes);
        }
        let drive =
            serde_json::to_string(&step.state).expect("a state holds only maps with text keys");
        if drive != self.kept {
            writes.push(writes::drive(&step.state, drive.clone()));
        }
        if step.state.position() != self.state.position() {
            writes.push(Write::Position(step.state.position()));
        }
        if !writes.is_empty() {
            self.shared.store.session_commit(self.id(), self.shared.lease, at, writes).await?;
        }
        self.kept = drive;
        self.state = step.state.clone();
        self.view.send_replace(self.state.clone());
        self.tell(false);
        Ok(())
    }

    async fn carry_out(&mut self, step: Step) -> Go {
        let put_away = step
            .actions
            .iter()
            .any(|action| matches!(action, Action::Show { state: SessionState::Archived, .. }));
        for action in step.actions {
            self.act(action).await;
        }
        if put_away {
            self.trim();
        }
        Ok(())
    }

    async fn delete(&mut self, reply: Reply<()>) -> Go {
        // Of a save under way only we know.
        let also = self.state.saving().cloned().map(Removal::Snapshot).into_iter().collect();
        match self.shared.store.session_delete(self.id(), self.shared.lease, also, now()).await {
            Ok(removals) => {
                self.detach();
                // Who starts or keeps something for the session still finds nobody to tell, and clears up.
                self.notes.close();
                carry_out(&self.shared, &removals).await;
                let _ = reply.send(Ok(()));
                Err(Over)
            }
            Err(error) => {
                let _ = reply.send(Err(error.into()));
                Ok(())
            }
        }
    }
}

/// The first event of every session.
pub(crate) fn created(at: harvest_proto::Timestamp) -> Write {
    let state = harvest_proto::api::SessionState::Queued;
    writes::event(
        at,
        None,
        EventBody::StateChanged { state, reason: "created".to_owned(), detail: None },
    )
}

fn snapshot_event(snapshot: &SnapshotId, kind: SnapshotKind, millis: u64) -> EventBody {
    EventBody::SnapshotTaken { snapshot: snapshot.clone(), kind, millis }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.detach();
        self.shared.usher.leave(self.id());
    }
}
