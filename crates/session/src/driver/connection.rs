//! The driver's connection to its sandbox: events are written, then acknowledged; a lost connection
//! is redialled until the sandbox is found dead.

use std::{sync::Arc, time::Duration};

use harvest_gateway::{DoorListener, ledger::DoorPolicy};
use harvest_proto::{
    BUDGET_REACHED, EventBody, RepositoryName, SandboxId, SessionId, TurnReason,
    bridge::{BridgeRole, OutboxEvent, ToSupervisor},
    event::{BootFailure, BootPhase, PhaseStatus, SyncOutcome, TurnOutcome},
};
use harvest_store::{StoreError, Write};
use tokio::{sync::mpsc, time::Instant};

use super::{ControlFlow, Driver, TaskReport, blobs::store_blobs, commit::EventCommit};
use crate::{
    agent_launch::agent_info,
    bridge::{Bridge, BridgeError, OpenedBridge, OwnerMessage},
    compute_meter::compute_owner,
    context::Shared,
    decide::{Decision, Input, SandboxState, State, Turn, decide},
    error::SessionError,
    error_chain::error_chain,
    history::{HistoryBudget, stored_size},
    repositories::PassSpec,
    sandboxes::{Found, SandboxError},
    tools::SessionTools,
    wall_clock::now,
};

// Events per transaction, so that the first of many becomes visible soon.
const EVENT_BATCH: usize = 256;

const MIN_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(2);

pub(super) struct Connection {
    pub(super) bridge: Bridge,
    epoch: u64,
    events: mpsc::Receiver<OwnerMessage>,
    /// An event of this connection was stored.
    useful: bool,
    /// Events that a full disk kept from being stored.
    unstored: Option<Unstored>,
}

struct Unstored {
    events: Vec<OutboxEvent>,
    retry_at: Instant,
    wait: Duration,
}

/// The backoff before the next dial. Only a connection that brought an event resets it: a sandbox
/// whose connections break at once would be dialled in a busy loop otherwise.
fn redial_delay(last: Duration, useful: bool) -> Duration {
    if useful { Duration::ZERO } else { (last * 2).clamp(MIN_DELAY, MAX_DELAY) }
}

pub(super) enum ConnectionEvent {
    /// Events, and the number of detached commands if a heartbeat arrived with them.
    Events(Vec<OutboxEvent>, Option<u32>),
    Lost,
}

/// Waits for events; never returns without a connection.
pub(super) async fn next_event(connection: &mut Option<Connection>) -> ConnectionEvent {
    let Some(connection) = connection else { return std::future::pending().await };
    if let Some(Unstored { retry_at, events, .. }) = &mut connection.unstored
        && !events.is_empty()
    {
        tokio::time::sleep_until(*retry_at).await;
        return ConnectionEvent::Events(std::mem::take(events), None);
    }
    let mut messages = Vec::new();
    if connection.events.recv_many(&mut messages, EVENT_BATCH).await == 0 {
        return ConnectionEvent::Lost;
    }
    let mut detached_now = None;
    let events = messages.into_iter().filter_map(|message| match message {
        OwnerMessage::Event(event) => Some(*event),
        OwnerMessage::Heartbeat { detached } => {
            detached_now = Some(detached);
            None
        }
    });
    ConnectionEvent::Events(events.collect(), detached_now)
}

impl Driver {
    pub(super) async fn on_connection_event(&mut self, event: ConnectionEvent) -> ControlFlow {
        match event {
            ConnectionEvent::Events(events, detached) => {
                if !events.is_empty() {
                    self.store_events(events).await?;
                }
                self.set_detached(detached.unwrap_or(self.detached)).await
            }
            ConnectionEvent::Lost => self.on_connection_lost().await,
        }
    }

    /// While detached commands run the sandbox is not idle; when the number changes it was just
    /// used.
    async fn set_detached(&mut self, detached: u32) -> ControlFlow {
        if std::mem::replace(&mut self.detached, detached) == detached {
            return Ok(());
        }
        self.input(Input::Touched).await
    }

    async fn store_events(&mut self, events: Vec<OutboxEvent>) -> ControlFlow {
        let Some(connection) = &self.connection else { return Ok(()) };
        let epoch = connection.epoch;
        let stored = self.stored_in(epoch).unwrap_or(0);
        // After a reconnect the supervisor resends stored events; each must be decided only once.
        let mut fresh: Vec<_> = events.into_iter().filter(|event| event.number > stored).collect();
        let Some(last) = fresh.last().map(|event| event.number) else { return Ok(()) };
        let mut decision = Decision { state: self.state.clone(), actions: Vec::new() };
        let (mut writes, mut history) = (Vec::new(), self.history.clone());
        for event in &mut fresh {
            add_end_reason(&mut event.body, &decision.state);
            let input = input_of(epoch, event);
            writes.push(history_write(&mut history, epoch, event.clone()));
            writes.extend(agent_info(&event.body).map(|info| Write::AgentInfo(Box::new(info))));
            let bases = synced_bases(&event.body);
            if !bases.is_empty() {
                self.synced_in = Some(epoch);
                writes.extend(bases);
            }
            if let Some(input) = input {
                let Decision { state, mut actions } = decision;
                decision = self.decide_with(|context| decide(state, input, context));
                actions.append(&mut decision.actions);
                decision.actions = actions;
            }
        }
        self.cache_base(&writes);
        match self.commit_events(&decision, writes).await? {
            EventCommit::Stored => {}
            EventCommit::Gap => {
                // The stored number is read again for the reconnect; the supervisor then resends
                // the events after it.
                self.stored = None;
                return self.on_connection_lost().await;
            }
            EventCommit::DiskFull => {
                self.retry_events_later(fresh);
                return Ok(());
            }
        }
        (self.stored, self.history) = (Some((epoch, last)), history);
        if let Some(connection) = &mut self.connection {
            (connection.useful, connection.unstored) = (true, None);
            connection.bridge.send(ToSupervisor::EventsStored { upto: last });
        }
        self.run_effects(decision).await
    }

    /// The limit of a turn holds across a restart of the server.
    pub(super) async fn load_turn_history(&mut self) {
        let Some(turn) = self.state.turn().map(|turn| turn.turn.clone()) else { return };
        let (store, id) = (&self.shared.store, self.id());
        let loaded = async {
            let (bytes, events) = store.turn_history(id, &turn).await?;
            let mut reached = false;
            for warning in self.shared.retention.rules.history.warnings() {
                reached = reached || store.event_exists(id, Some(&turn), &warning).await?;
            }
            Ok::<_, StoreError>((stored_size(bytes, events), reached))
        };
        match loaded.await {
            Ok((stored, reached)) => self.history.resume_turn(turn, stored, reached),
            Err(error) => {
                tracing::warn!(session = %self.id(), %error, "cannot read the history of a turn")
            }
        }
    }

    /// Keeps the events and the connection: a reconnect would write to the full disk, too. The
    /// agent waits meanwhile, and the session can be stopped and deleted.
    fn retry_events_later(&mut self, events: Vec<OutboxEvent>) {
        let Some(connection) = &mut self.connection else { return };
        let wait = connection.unstored.take().map_or(MIN_DELAY, |last| last.wait * 2);
        let wait = wait.min(MAX_DELAY);
        connection.unstored = Some(Unstored { events, retry_at: Instant::now() + wait, wait });
    }

    async fn on_connection_lost(&mut self) -> ControlFlow {
        let Some(connection) = self.connection.take() else { return Ok(()) };
        let epoch = connection.epoch;
        self.redial_delay = redial_delay(self.redial_delay, connection.useful);
        drop(connection);
        self.input(Input::LinkLost { epoch }).await?;
        if let SandboxState::Booting { sandbox, .. } | SandboxState::Ready { sandbox, .. } =
            &self.state.sandbox
        {
            let sandbox = sandbox.clone();
            self.thaw_if_frozen();
            self.dial(sandbox, epoch);
        }
        Ok(())
    }

    /// Opens the door of a running sandbox and watches for its exit.
    pub(super) async fn on_running(&mut self, epoch: u64) {
        if epoch != self.state.epoch {
            return;
        }
        let Some(sandbox) = self.state.sandbox_id().cloned() else { return };
        self.shared.sandboxes.meter.begin(sandbox.clone(), compute_owner(&self.record));
        self.request_door(epoch, sandbox.clone()).await;
        let (shared, reports) = (Arc::clone(&self.shared), self.report_sender.clone());
        self.spawn_attached(async move {
            if let Ok(reason) = shared.sandboxes.provider.wait(&sandbox).await {
                let _ = reports.send(Input::SandboxEnded { epoch, reason }.into());
            }
        });
    }

    /// Opens the door as soon as the trusted names are known. Only outgoing traffic of the sandbox
    /// waits for it.
    async fn request_door(&mut self, epoch: u64, sandbox: SandboxId) {
        let repositories = match self.shared.store.repository_list_of(self.id()).await {
            Ok(repositories) => repositories,
            Err(error) => {
                tracing::error!(session = %self.id(), %error, "cannot read the session's repositories");
                return;
            }
        };
        self.set_upstream_of_turn().await;
        let (shared, upstream) = (Arc::clone(&self.shared), self.upstream.subscribe());
        let own = PassSpec::of_session(&self.record, &shared.sandboxes.agents);
        let spec = PassSpec { upstream, ..own };
        let reports = self.report_sender.clone();
        self.spawn_attached(async move {
            let door = async {
                let policy = shared.repositories.pass(&repositories, spec).await?;
                let listener = shared.sandboxes.provider.listen(&sandbox).await?;
                Ok::<_, SessionError>((listener, Box::new(policy)))
            };
            let door = door.await;
            let _ = reports.send(TaskReport::DoorReady { epoch, door });
        });
    }

    /// The turn of an adopted sandbox may use another model service than its session.
    async fn set_upstream_of_turn(&mut self) {
        let Some(prompt) = self.state.turn().map(|turn| turn.prompt.clone()) else { return };
        let Some(prompt) = self.prompt(&prompt).await else { return };
        if let Ok(launch) = self.launch(true, Some(&prompt)) {
            self.upstream.send_replace(launch.upstream);
        }
    }

    pub(super) fn on_door_ready(
        &mut self,
        epoch: u64,
        door: Result<(Box<dyn DoorListener>, Box<DoorPolicy>), SessionError>,
    ) {
        let running =
            matches!(self.state.sandbox, SandboxState::Booting { .. } | SandboxState::Ready { .. });
        if epoch != self.state.epoch || !running {
            return;
        }
        match door {
            Ok((listener, policy)) => {
                let (session, shared) = (self.id().clone(), Arc::clone(&self.shared));
                let tools = Arc::new(SessionTools::new(session, shared));
                let doors = &self.shared.sandboxes.doors;
                self.door = Some(doors.open(listener, *policy, None, Some(tools)));
            }
            Err(error) => {
                let error = error_chain(&error);
                tracing::error!(session = %self.id(), error, "cannot open the sandbox's door");
                let message = format!("the sandbox has no network: {error}");
                let body = EventBody::Warning { message };
                let warning = super::writes::event(now(), None, body);
                let _ = self.report_sender.send(TaskReport::Input(Input::Touched, vec![warning]));
            }
        }
    }

    pub(super) fn dial(&mut self, sandbox: SandboxId, epoch: u64) {
        let (shared, reports) = (Arc::clone(&self.shared), self.report_sender.clone());
        let (session, delay) = (self.id().clone(), self.redial_delay);
        let stored = self.stored_in(epoch);
        self.spawn_attached(async move {
            tokio::time::sleep(delay).await;
            let report = dial(&shared, &session, &sandbox, epoch, stored).await;
            let _ = reports.send(report);
        });
    }

    /// The highest outbox number of this epoch in the store, once it is known: only this driver
    /// stores events of its sandbox.
    fn stored_in(&self, epoch: u64) -> Option<u64> {
        self.stored.filter(|(of, _)| *of == epoch).map(|(_, stored)| stored)
    }

    pub(super) async fn connected(
        &mut self,
        epoch: u64,
        stored: u64,
        opened: OpenedBridge,
    ) -> ControlFlow {
        let wanted =
            matches!(self.state.sandbox, SandboxState::Booting { .. } | SandboxState::Ready { .. });
        if epoch != self.state.epoch || !wanted {
            return Ok(());
        }
        // An earlier connection may have stored events since this one was dialled.
        self.stored = Some((epoch, self.stored_in(epoch).unwrap_or(0).max(stored)));
        let OpenedBridge { bridge, status, events } = opened;
        let events = store_blobs(&self.shared, self.id(), &self.secrets, bridge.clone(), events);
        self.connection = Some(Connection { bridge, epoch, events, useful: false, unstored: None });
        // Set before the decision on `LinkUp`, which depends on it.
        let changed = std::mem::replace(&mut self.detached, status.detached) != status.detached;
        self.input(Input::LinkUp { epoch, status }).await?;
        if changed { self.input(Input::Touched).await } else { Ok(()) }
    }

    /// Spawns a task that is aborted when the driver disconnects from the sandbox.
    pub(super) fn spawn_attached(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.attached.retain(|task| !task.is_finished());
        self.attached.push(self.shared.tasks.spawn(task).abort_handle());
    }

    /// Closes the connection, the door and the freezer, and aborts the attached tasks.
    pub(super) fn disconnect(&mut self) {
        for task in self.attached.drain(..) {
            task.abort();
        }
        self.connection = None;
        self.redial_delay = Duration::ZERO;
        self.door = None;
        self.freezer = None;
        self.detached = 0;
    }
}

async fn dial(
    shared: &Shared,
    session: &SessionId,
    sandbox: &SandboxId,
    epoch: u64,
    stored: Option<u64>,
) -> TaskReport {
    let mut delay = MIN_DELAY;
    loop {
        match open(shared, session, sandbox, epoch, stored).await {
            Ok((stored, opened)) => {
                return TaskReport::Connected { epoch, stored, opened: Box::new(opened) };
            }
            // A retry cannot help: the sandbox is saved, and the session continues in a new one.
            Err(SandboxError::Bridge(error @ BridgeError::OtherVersion { .. })) => {
                tracing::warn!(%sandbox, %error, "cannot adopt a sandbox");
                let reason = error.to_string();
                return Input::SandboxEnded { epoch, reason }.into();
            }
            Err(error) => tracing::debug!(%sandbox, error = error_chain(&error), "cannot dial"),
        }
        match shared.sandboxes.provider.find(sandbox).await {
            Ok(Found::Dead { reason }) => return Input::SandboxEnded { epoch, reason }.into(),
            Ok(Found::Gone) => return Input::FoundGone { epoch }.into(),
            Ok(Found::Running) | Err(_) => {}
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(MAX_DELAY);
    }
}

async fn open(
    shared: &Shared,
    session: &SessionId,
    sandbox: &SandboxId,
    epoch: u64,
    stored: Option<u64>,
) -> Result<(u64, OpenedBridge), SandboxError> {
    let unreadable = |error| SandboxError::failed("cannot read what is stored", error);
    let stored = match stored {
        Some(stored) => stored,
        None => shared.store.outbox_stored(session, epoch).await.map_err(unreadable)?,
    };
    let stream = shared.sandboxes.provider.connect(sandbox).await?;
    let role = BridgeRole::Owner { lease: shared.lease.0, epoch, stored };
    let opened = Bridge::open(stream, role, Some(shared.timeouts.liveness())).await?;
    Ok((stored, opened))
}

/// Stores an event as far as the history's budget allows.
fn history_write(history: &mut HistoryBudget, epoch: u64, event: OutboxEvent) -> Write {
    let OutboxEvent { number, at, turn, body } = event;
    match history.admit(turn.as_ref(), body) {
        Some(body) => {
            Write::Outbox { epoch, event: Box::new(OutboxEvent { number, at, turn, body }) }
        }
        None => Write::OutboxSkip { epoch, number },
    }
}

/// Where the session's changes begin after a sync beside the agent, or a requested one.
fn synced_bases(body: &EventBody) -> Vec<Write> {
    let base = |repository: &RepositoryName, commit: &Option<String>| {
        Some(Write::BaseCommit { repository: repository.clone(), commit: commit.clone()? })
    };
    match body {
        EventBody::Synced { checkouts, .. } => {
            checkouts.iter().filter_map(|one| base(&one.repository, &one.base)).collect()
        }
        EventBody::SyncEnded { checkouts, .. } => {
            let rebased = checkouts.iter().filter(|one| one.outcome == SyncOutcome::Rebased);
            rebased.filter_map(|one| base(&one.repository, &one.base)).collect()
        }
        _ => Vec::new(),
    }
}

/// Completes the reason for the end of a turn. The supervisor stops a turn on request, but the
/// server knows whose request it was; an agent fails when a model call is refused, and repeats what
/// the gateway said.
fn add_end_reason(body: &mut EventBody, state: &State) {
    match body {
        EventBody::TurnEnded { outcome: TurnOutcome::Stopped, reason: reason @ None, .. } => {
            *reason = state.turn().map(Turn::stop_reason);
        }
        EventBody::TurnEnded {
            outcome: TurnOutcome::Failed, reason, error: Some(error), ..
        } if error.contains(BUDGET_REACHED.trim_end()) => *reason = Some(TurnReason::Budget),
        _ => {}
    }
}

/// The input that an event causes, if any.
fn input_of(epoch: u64, event: &OutboxEvent) -> Option<Input> {
    match &event.body {
        EventBody::BootPhase { phase: BootPhase::Ready, status: PhaseStatus::Done, .. } => {
            Some(Input::BootReady { epoch })
        }
        EventBody::BootPhase { failure: Some(BootFailure { message, permanent, .. }), .. } => {
            let (detail, permanent) = (message.clone(), *permanent);
            Some(Input::BootFailed { epoch, detail, permanent })
        }
        EventBody::TurnEnded { prompt, outcome, reason, .. } => {
            Some(Input::TurnEnded { prompt: prompt.clone(), outcome: *outcome, reason: *reason })
        }
        EventBody::SyncEnded { checkouts, .. } => {
            Some(Input::SyncEnded { checkouts: checkouts.clone() })
        }
        EventBody::RequestOpened { request, .. } => {
            Some(Input::RequestOpened { request: request.clone() })
        }
        EventBody::RequestClosed { request, answer } => {
            Some(Input::RequestClosed { request: request.clone(), answered: answer.is_some() })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overdue_turn_has_its_own_reason() {
        let mut turn = Turn {
            prompt: harvest_proto::PromptId::random(),
            turn: harvest_proto::TurnId::random(),
            number: 1,
            since: now(),
            failed_checks: None,
            prompt_accepted: true,
            stopping: Some(now()),
            overdue: false,
            question: None,
            handed_over: None,
        };
        assert_eq!(turn.stop_reason().as_str(), "stopped");
        turn.overdue = true;
        assert_eq!(turn.stop_reason().as_str(), "time_limit");
    }

    #[test]
    fn refused_call_ends_turn_for_its_budget() {
        let state = State::new(None, false);
        let reason = |outcome, error: &str| {
            let mut body = EventBody::TurnEnded {
                prompt: harvest_proto::PromptId::random(),
                outcome,
                reason: Some(TurnReason::AgentFailed),
                error: Some(error.to_owned()),
                millis: 1,
            };
            add_end_reason(&mut body, &state);
            let EventBody::TurnEnded { reason, .. } = body else { unreachable!() };
            reason
        };
        let refused = format!("API Error: 400 {BUDGET_REACHED}$2.50 for this session");
        assert_eq!(reason(TurnOutcome::Failed, &refused), Some(TurnReason::Budget));
        assert_eq!(reason(TurnOutcome::Stopped, &refused), Some(TurnReason::AgentFailed));
        assert_eq!(reason(TurnOutcome::Failed, "overloaded"), Some(TurnReason::AgentFailed));
    }

    #[test]
    fn useless_connections_are_redialled_with_backoff() {
        let mut waits = vec![Duration::ZERO];
        for _ in 0..10 {
            waits.push(redial_delay(*waits.last().unwrap(), false));
        }
        assert_eq!((waits[1], waits[2], waits[10]), (MIN_DELAY, 2 * MIN_DELAY, MAX_DELAY));
        assert_eq!(redial_delay(MAX_DELAY, true), Duration::ZERO);
    }
}
