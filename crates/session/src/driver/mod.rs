//! The driver: one task per session that owns its state. It feeds `decide`, writes the persisted
//! actions, then runs the effects. It awaits nothing but the store, so a session responds while its
//! sandbox starts or is saved: long effects run in tasks of their own and report back.

mod blobs;
mod commit;
mod connection;
mod effects;
mod event_mask;
mod freezer;
mod handle;
mod images;
mod late_results;
mod launch;
mod past_messages;
mod preconditions;
mod prompts;
mod secrets;
mod writes;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harvest_gateway::{DoorListener, ledger::DoorPolicy};
use harvest_proto::{
    PromptId, RepositoryName, SandboxId, SessionId, SnapshotId, TurnId, UpstreamName,
    api::{Evidence, Prompt, SessionState},
    bridge::BootStart,
};
use harvest_store::{CheckoutRecord, Removal, SessionRecord, StoreError, Write};
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};

use crate::{
    bridge::OpenedBridge,
    context::Shared,
    decide::{
        Action, Activity, Decision, Input, SandboxState, State, StepContext, decide, restart,
    },
    error::SessionError,
    history::{HistoryBudget, stored_size},
    repositories::describe_failures,
    sandboxes::admission::Notice,
    wall_clock::now,
};

pub(crate) use handle::{BusyGuard, Command, DriverHandle, PromptCommand, Reply};
pub(crate) use prompts::title;
pub(crate) use secrets::mask_prompt;
pub(crate) use writes::{created, event, state as state_write};

use connection::Connection;
use handle::Rest;
use secrets::SessionSecrets;

/// The title of a session before its first prompt.
pub(crate) const UNTITLED: &str = "untitled";

/// Reports of the driver's own tasks and of admission.
pub(crate) enum TaskReport {
    Input(Input, Vec<Write>),
    Started {
        epoch: u64,
        sandbox: SandboxId,
        start: BootStart,
        writes: Vec<Write>,
    },
    FoundRunning {
        epoch: u64,
    },
    Connected {
        epoch: u64,
        /// The highest outbox number in the store when the sandbox was dialled.
        stored: u64,
        opened: Box<OpenedBridge>,
    },
    DoorReady {
        epoch: u64,
        /// The listener and the policy of its connections.
        door: Result<(Box<dyn DoorListener>, Box<DoorPolicy>), SessionError>,
    },
    /// The results of the checks of pushed commits.
    Reviewed(Vec<Evidence>),
}

impl From<Input> for TaskReport {
    fn from(input: Input) -> Self {
        Self::Input(input, Vec::new())
    }
}

pub(crate) struct Driver {
    shared: Arc<Shared>,
    record: SessionRecord,
    state: State,
    /// The state as it is in the store.
    stored_state: String,
    commands: mpsc::UnboundedReceiver<Command>,
    reports: mpsc::UnboundedReceiver<TaskReport>,
    report_sender: mpsc::UnboundedSender<TaskReport>,
    view: watch::Sender<State>,
    execs: Arc<AtomicUsize>,
    rest: Arc<Rest>,
    /// Commands handled since `rest` was updated.
    handled: usize,
    /// A command that ends work and waits for an earlier decision to be stored.
    postponed: Option<Command>,
    connection: Option<Connection>,
    /// The highest outbox number in the store, and its epoch, once it is known.
    stored: Option<(u64, u64)>,
    history: HistoryBudget,
    /// The prompt whose effects run; others are read from the store.
    new_prompt: Option<Prompt>,
    /// The wait before the next dial after a lost connection.
    redial_delay: Duration,
    door: Option<Box<dyn std::any::Any + Send>>,
    /// The model service of the door, that of the last prompt.
    upstream: watch::Sender<UpstreamName>,
    /// Tasks that are aborted when the driver disconnects from the sandbox.
    attached: Vec<AbortHandle>,
    /// A review runs; `true` when another one must follow it.
    reviewing: Option<bool>,
    freezer: Option<freezer::Freezer>,
    /// The number of detached commands in the sandbox, as last reported by its supervisor.
    detached: u32,
    /// The epoch in which a sync beside the agent has said where the session's changes begin.
    synced_in: Option<u64>,
    secrets: Arc<SessionSecrets>,
}

/// The driver must exit: another server took over, or the session is deleted.
struct DriverExit;

type ControlFlow = Result<(), DriverExit>;

impl Driver {
    /// Starts a driver from the stored state and the queued prompts.
    pub(crate) fn spawn(
        shared: &Arc<Shared>,
        record: SessionRecord,
        queue: Vec<PromptId>,
    ) -> Result<DriverHandle, SessionError> {
        shared.check_provider(&record.session)?;
        let state: State = serde_json::from_str(&record.driver_state)
            .map_err(|_| StoreError::Corrupt { column: "driver_state" })?;
        let (commands, inbox) = mpsc::unbounded_channel();
        let (report_sender, reports) = mpsc::unbounded_channel();
        let (view, view_receiver) = watch::channel(state.clone());
        let (execs, rest) = (Arc::new(AtomicUsize::new(0)), Arc::<Rest>::default());
        let stored = stored_size(record.history_bytes, record.session.seq);
        let history = HistoryBudget::new(shared.retention.rules.history, stored);
        let agents = &shared.sandboxes.agents;
        // An agent that is no longer configured does not start; this reaches no service.
        let upstream = agents.upstream_of(&record.session.agent, record.session.model.as_ref());
        let upstream = upstream.unwrap_or_else(|_| UpstreamName::scripted());
        let driver = Box::new(Self {
            shared: Arc::clone(shared),
            secrets: SessionSecrets::of(&record),
            stored_state: record.driver_state.clone(),
            record,
            state,
            commands: inbox,
            reports,
            report_sender,
            view,
            execs: Arc::clone(&execs),
            rest: Arc::clone(&rest),
            handled: 0,
            postponed: None,
            connection: None,
            stored: None,
            history,
            new_prompt: None,
            redial_delay: Duration::ZERO,
            door: None,
            upstream: watch::channel(upstream).0,
            attached: Vec::new(),
            reviewing: None,
            freezer: None,
            detached: 0,
            synced_in: None,
        });
        let author = &driver.record.session.author.email;
        let user = driver.state.user.clone().unwrap_or_else(|| author.clone());
        shared.sandboxes.admission.register(
            driver.id(),
            user,
            &driver.state,
            driver.slot_notices(),
        );
        shared.tasks.spawn(driver.run(queue));
        Ok(DriverHandle { commands, view: view_receiver, execs, rest })
    }

    /// The handlers are boxed: their futures are large, and most drivers wait most of the time.
    async fn run(mut self: Box<Self>, queue: Vec<PromptId>) {
        self.load_turn_history().await;
        let decision = self.decide_with(|context| restart(self.state.clone(), queue, context));
        let (id, mut flow) =
            (self.id().clone(), Box::pin(self.commit_with_retry(decision, Vec::new())).await);
        while flow.is_ok() {
            self.report_rest();
            let deadline = self.next_deadline();
            flow = tokio::select! {
                command = next_command(&mut self.postponed, &mut self.commands) => match command {
                    Some(command) => Box::pin(self.on_command(command)).await,
                    None => Err(DriverExit),
                },
                report = self.reports.recv() => match report {
                    Some(report) => Box::pin(self.on_report(report)).await,
                    None => Err(DriverExit),
                },
                event = connection::next_event(&mut self.connection) => {
                    Box::pin(self.on_connection_event(event)).await
                }
                () = tokio::time::sleep(deadline) => Box::pin(self.input(Input::Tick)).await,
            };
        }
        tracing::debug!(session = %id, "the driver exits");
    }

    fn id(&self) -> &SessionId {
        &self.record.session.id
    }

    fn next_deadline(&self) -> Duration {
        // A day: practically never. The end of the use wakes the driver earlier.
        let day = Duration::from_secs(24 * 60 * 60);
        let idle = matches!(
            self.state.sandbox,
            SandboxState::Ready { activity: Activity::Idle { .. }, .. }
        );
        if idle && self.is_busy() && self.connection.is_some() {
            return day;
        }
        let now = self.shared.clock.now();
        self.state.next_deadline(&self.shared.timeouts).map_or(day, |at| {
            // One millisecond more, so that the deadline has passed when the timer fires.
            at.since(now) + Duration::from_millis(1)
        })
    }

    fn is_busy(&self) -> bool {
        self.execs.load(Ordering::SeqCst) > 0 || self.detached > 0
    }

    fn decide(&self, input: Input) -> Decision {
        self.decide_with(|context| decide(self.state.clone(), input, context))
    }

    fn decide_with(&self, step: impl FnOnce(&StepContext<'_>) -> Decision) -> Decision {
        step(&StepContext {
            now: self.shared.clock.now(),
            timeouts: &self.shared.timeouts,
            busy: self.is_busy(),
            claim_slot: &|| self.shared.sandboxes.admission.claim(self.id()),
            sandbox: SandboxId::random(),
            turn: TurnId::random(),
            snapshot: SnapshotId::random(),
        })
    }

    /// Turns the notices of admission into reports to this driver.
    fn slot_notices(&self) -> impl Fn(Notice) + Send + 'static {
        let reports = self.report_sender.clone();
        move |notice| {
            let input = match notice {
                Notice::Granted { sequence } => Input::SlotGranted { sequence },
                Notice::Queued { sequence, limit, position } => {
                    Input::SlotQueued { sequence, limit, position }
                }
                Notice::ReleaseRequested => Input::SlotReleaseRequested,
            };
            let _ = reports.send(input.into());
        }
    }

    /// Reports the slot state to admission. `answered` when a release request was just decided.
    fn report_slot(&self, answered: bool) {
        self.shared.sandboxes.admission.report(self.id(), &self.state, self.is_busy(), answered);
    }

    /// Commands count as handled only after their effect on `resting` is visible.
    fn report_rest(&mut self) {
        self.rest.resting.store(self.is_resting(), Ordering::SeqCst);
        self.rest.pending.fetch_sub(std::mem::take(&mut self.handled), Ordering::SeqCst);
    }

    /// Whether the driver could be replaced by a new one from the stored state.
    fn is_resting(&self) -> bool {
        self.state.is_resting(&self.shared.timeouts)
            && self.state.queue.is_empty()
            && self.reviewing.is_none()
            && self.connection.is_none()
            && self.attached.iter().all(AbortHandle::is_finished)
            && self.reports.is_empty()
            && !self.is_busy()
    }

    async fn on_command(&mut self, command: Command) -> ControlFlow {
        self.handled += 1;
        match command {
            Command::Prompt(command) => self.on_prompt(*command).await,
            Command::Apply { input, writes, reply } => match self.commit_once(*input, writes).await
            {
                Ok((decision, _)) => {
                    let _ = reply.send(Ok(()));
                    self.run_effects(decision).await
                }
                Err(error) => refuse(reply, error),
            },
            Command::Bridge { reply } => {
                let flow = self.on_use().await;
                let connection = self.connection.as_ref().filter(|_| self.state.accepts_work());
                let _ = reply.send(connection.map(|connection| connection.bridge.clone()));
                flow
            }
            Command::UseBegan => {
                self.thaw_if_frozen();
                self.on_use().await
            }
            Command::UseEnded => self.input(Input::Touched).await,
            Command::Delete { reply } => self.delete(reply).await,
            Command::Exit if self.is_resting() => Err(DriverExit),
            Command::Exit => {
                self.rest.leaving.store(false, Ordering::SeqCst);
                Ok(())
            }
        }
    }

    /// The sandbox is needed: thaws it, and keeps its slot meanwhile.
    async fn on_use(&mut self) -> ControlFlow {
        if self.state.accepts_work() || !matches!(self.state.sandbox, SandboxState::Ready { .. }) {
            self.report_slot(false);
            return Ok(());
        }
        self.input(Input::Touched).await
    }

    async fn on_report(&mut self, report: TaskReport) -> ControlFlow {
        match report {
            TaskReport::Input(input, mut writes) => {
                if let Input::Prepared { epoch } = input
                    && self.synced_in == Some(epoch)
                {
                    // The look at the checkouts may be older than the end of the sync.
                    writes.retain(|write| !matches!(write, Write::BaseCommit { .. }));
                }
                self.cache_base(&writes);
                let answered = input == Input::SlotReleaseRequested;
                let decision = self.decide(input);
                self.commit_with_retry(decision, writes).await?;
                if answered {
                    self.report_slot(true);
                }
                Ok(())
            }
            TaskReport::Started { epoch, sandbox, start, writes } => {
                let wanted = epoch == self.state.epoch
                    && matches!(self.state.sandbox, SandboxState::Starting { .. });
                if !wanted {
                    self.discard_late(sandbox);
                    return Ok(());
                }
                self.on_running(epoch).await;
                let decision = self.decide(Input::Started { epoch, start });
                self.commit_with_retry(decision, writes).await
            }
            TaskReport::FoundRunning { epoch } => {
                self.on_running(epoch).await;
                self.input(Input::FoundRunning { epoch }).await
            }
            TaskReport::Connected { epoch, stored, opened } => {
                self.connected(epoch, stored, *opened).await
            }
            TaskReport::DoorReady { epoch, door } => {
                self.on_door_ready(epoch, door);
                Ok(())
            }
            TaskReport::Reviewed(results) => {
                if self.reviewing.take() == Some(true) {
                    self.review();
                }
                if results.is_empty() {
                    return Ok(());
                }
                self.input(Input::Reviewed { failed_checks: describe_failures(&results) }).await
            }
        }
    }

    /// Applies writes about base commits to the driver's own copy of the record, too.
    fn cache_base(&mut self, writes: &[Write]) {
        for write in writes {
            match write {
                Write::BaseCommit { repository, commit } => {
                    self.update_checkout(repository, |known| {
                        known.base_commit = Some(commit.clone())
                    });
                }
                Write::DefaultBase { repository, base } => {
                    self.update_checkout(repository, |known| {
                        known.base.get_or_insert_with(|| base.clone());
                    });
                }
                _ => {}
            }
        }
    }

    fn update_checkout(
        &mut self,
        repository: &RepositoryName,
        change: impl FnOnce(&mut CheckoutRecord),
    ) {
        let mut checkouts = self.record.checkouts.iter_mut();
        if let Some(known) = checkouts.find(|known| known.repository == *repository) {
            change(known);
        }
    }

    async fn input(&mut self, input: Input) -> ControlFlow {
        let decision = self.decide(input);
        self.commit_with_retry(decision, Vec::new()).await
    }

    async fn run_effects(&mut self, decision: Decision) -> ControlFlow {
        let archived = decision.actions.iter().any(|action| {
            matches!(action, Action::SetPublicState { state: SessionState::Archived, .. })
        });
        for action in decision.actions {
            self.run_effect(action).await;
        }
        if archived {
            self.apply_retention();
        }
        Ok(())
    }

    async fn delete(&mut self, reply: Reply<()>) -> ControlFlow {
        // Only the driver knows of a snapshot that is being taken.
        let pending = self.state.saving().cloned().map(Removal::Snapshot).into_iter().collect();
        match self.shared.store.session_delete(self.id(), self.shared.lease, pending, now()).await {
            Ok(removals) => {
                self.disconnect();
                // A task that still starts or saves something finds the channel closed and cleans
                // up.
                self.reports.close();
                self.shared.removals.remove_now(&removals).await;
                let _ = reply.send(Ok(()));
                Err(DriverExit)
            }
            Err(error) => {
                let _ = reply.send(Err(error.into()));
                Ok(())
            }
        }
    }
}

async fn next_command(
    postponed: &mut Option<Command>,
    commands: &mut mpsc::UnboundedReceiver<Command>,
) -> Option<Command> {
    match postponed.take() {
        Some(command) => Some(command),
        None => commands.recv().await,
    }
}

/// Replies with an error; the driver of a server that lost its lease exits.
fn refuse<T>(reply: Reply<T>, error: SessionError) -> ControlFlow {
    let exits = matches!(error, SessionError::Stopped);
    let _ = reply.send(Err(error));
    if exits { Err(DriverExit) } else { Ok(()) }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.disconnect();
        self.shared.sandboxes.admission.unregister(self.id());
    }
}
