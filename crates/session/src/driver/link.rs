//! The driver's connection to its sandbox: events are written, then acknowledged; a lost connection
//! is dialled again until the sandbox is found dead.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt;
use harvest_gateway::ledger::Pass;
use harvest_proto::{
    EventBody, SandboxId, SessionId,
    bridge::{OutboxEvent, Role, ToSupervisor},
    event::{BootPhase, PhaseStatus},
};
use harvest_store::{StoreError, Write};
use tokio::sync::mpsc;

use super::{Driver, Go, Note, Over};
use crate::{
    bridge::{Bridge, BridgeError, FromBridge, Opened},
    decide::{Input, Machine, Step, decide},
    provider::{Found, ProviderError, Started},
    wiring::{PassOrder, Shared, words},
};

// One transaction takes so many events at most, so that the first of them is seen soon.
const BATCH: usize = 256;

const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

pub(super) struct Link {
    pub(super) bridge: Bridge,
    epoch: u64,
    events: mpsc::Receiver<FromBridge>,
    /// The highest outbox number we have written.
    stored: u64,
    /// Something of it was written.
    useful: bool,
}

/// How long to wait before dialling again, given how long it was last time. Who never gets to say anything
/// that can be kept would be dialled without end otherwise.
fn wait_again(last: Duration, useful: bool) -> Duration {
    if useful { Duration::ZERO } else { (last * 2).clamp(FIRST_WAIT, LONGEST_WAIT) }
}

/// What was heard, or that nothing will be heard any more.
pub(super) enum Heard {
    /// Events, and how many detached commands run if that was said.
    Events(Vec<OutboxEvent>, Option<u32>),
    Lost,
}

/// Waits for events; for ever when there is no connection.
pub(super) async fn hear(link: &mut Option<Link>) -> Heard {
    let Some(link) = link else { return std::future::pending().await };
    let mut waiting = Vec::new();
    if link.events.recv_many(&mut waiting, BATCH).await == 0 {
        return Heard::Lost;
    }
    let mut running = None;
    let events = waiting.into_iter().filter_map(|heard| match heard {
        FromBridge::Event(event) => Some(*event),
        FromBridge::Heartbeat { detached, .. } => {
            running = Some(detached);
            None
        }
    });
    Heard::Events(events.collect(), running)
}

impl Driver {
    pub(super) async fn heard(&mut self, heard: Heard) -> Go {
        match heard {
            Heard::Events(events, running) => {
                if !events.is_empty() {
                    self.events(events).await?;
                }
                self.runs(running.unwrap_or(self.detached)).await
            }
            Heard::Lost => self.link_lost().await,
        }
    }

    /// So many commands go on by themselves: while there are any the machine is not idle, and when the last has
    /// ended it has just been used.
    async fn runs(&mut self, detached: u32) -> Go {
        if std::mem::replace(&mut self.detached, detached) == detached {
            return Ok(());
        }
        self.input(Input::Touched).await
    }

    async fn events(&mut self, events: Vec<OutboxEvent>) -> Go {
        let Some(link) = &self.link else { return Ok(()) };
        let (epoch, stored) = (link.epoch, link.stored);
        // What is stored already was sent again after a reconnect; deciding twice could answer twice.
        let fresh: Vec<_> = events.into_iter().filter(|event| event.number > stored).collect();
        let Some(last) = fresh.last().map(|event| event.number) else { return Ok(()) };
        let mut step = Step { state: self.state.clone(), actions: Vec::new() };
        let mut writes = Vec::new();
        for event in fresh {
            let input = input_of(epoch, &event);
            writes.push(Write::Outbox { epoch, event: Box::new(event) });
            if let Some(input) = input {
                let next = self.at(|moment, _| decide(step.state.clone(), input.clone(), moment));
                step.state = next.state;
                step.actions.extend(next.actions);
            }
        }
        let mut wait = FIRST_WAIT;
        loop {
            match self.attempt(&step, writes.clone()).await {
                Ok(()) => break,
                Err(StoreError::LeaseLost | StoreError::Closed | StoreError::NotFound { .. }) => {
                    return Err(Over);
                }
                // The supervisor sends what is missing once it is asked anew.
                Err(StoreError::OutboxGap { .. }) => return self.link_lost().await,
                Err(error) => {
                    tracing::error!(session = %self.id(), %error, "events cannot be written; trying again");
                    self.wait_out(&mut wait, &error).await;
                }
            }
        }
        if let Some(link) = &mut self.link {
            (link.stored, link.useful) = (last, true);
            link.bridge.say(ToSupervisor::EventsStored { upto: last });
        }
        self.carry_out(step).await
    }

    async fn link_lost(&mut self) -> Go {
        let Some(link) = self.link.take() else { return Ok(()) };
        let epoch = link.epoch;
        self.redial = wait_again(self.redial, link.useful);
        drop(link);
        self.input(Input::LinkLost { epoch }).await?;
        if let Machine::Booting { sandbox, .. } | Machine::Ready { sandbox, .. } =
            &self.state.machine
        {
            let sandbox = sandbox.clone();
            self.rouse();
            self.dial(sandbox, epoch);
        }
        Ok(())
    }

    /// The sandbox runs: open its door and watch for its end.
    pub(super) async fn meet(&mut self, epoch: u64, started: &Started) {
        if epoch != self.state.epoch {
            return;
        }
        self.open_door(epoch, started.door.clone()).await;
        let Some(sandbox) = self.state.sandbox().cloned() else { return };
        let (shared, notes) = (Arc::clone(&self.shared), self.notes_in.clone());
        self.attach(async move {
            if let Ok(reason) = shared.provider.ended(&sandbox).await {
                let _ = notes.send(Note::Input(Input::SandboxEnded { epoch, reason }, Vec::new()));
            }
        });
    }

    /// Opens the door now, or, while the names it may let through are not known yet, as soon as they are: what
    /// the sandbox sends out waits for its door, and nothing else does.
    async fn open_door(&mut self, epoch: u64, socket: PathBuf) {
        let repositories = match self.shared.repositories(&self.record).await {
            Ok(repositories) => repositories,
            Err(error) => {
                tracing::error!(session = %self.id(), %error, "the session's repositories cannot be read");
                return;
            }
        };
        let (shared, order) = (Arc::clone(&self.shared), PassOrder::from(&self.record));
        let mut pass = Box::pin(async move { shared.pass(&repositories, order).await });
        if let Some(pass) = (&mut pass).now_or_never() {
            return self.let_out(&socket, pass);
        }
        let notes = self.notes_in.clone();
        self.attach(async move {
            let pass = Box::new(pass.await);
            let _ = notes.send(Note::Pass { epoch, socket, pass });
        });
    }

    /// The names are known at last.
    pub(super) fn passes(&mut self, epoch: u64, socket: &Path, pass: Pass) {
        let runs = matches!(self.state.machine, Machine::Booting { .. } | Machine::Ready { .. });
        if epoch == self.state.epoch && runs {
            self.let_out(socket, pass);
        }
    }

    fn let_out(&mut self, socket: &Path, pass: Pass) {
        match self.shared.doors.open(socket, pass) {
            Ok(door) => self.door = Some(door),
            Err(error) => {
                tracing::error!(session = %self.id(), %error, "the sandbox's door cannot be opened");
                let message = format!("the sandbox has no way out: {error}");
                let body = EventBody::Warning { message };
                let warning = super::writes::event(crate::wiring::now(), None, body);
                let _ = self.notes_in.send(Note::Input(Input::Touched, vec![warning]));
            }
        }
    }

    pub(super) fn dial(&mut self, sandbox: SandboxId, epoch: u64) {
        let (shared, notes) = (Arc::clone(&self.shared), self.notes_in.clone());
        let (session, wait) = (self.id().clone(), self.redial);
        self.attach(async move {
            tokio::time::sleep(wait).await;
            let note = dial(&shared, &session, &sandbox, epoch).await;
            let _ = notes.send(note);
        });
    }

    pub(super) async fn connected(&mut self, epoch: u64, opened: Opened) -> Go {
        let wanted = matches!(self.state.machine, Machine::Booting { .. } | Machine::Ready { .. });
        if epoch != self.state.epoch || !wanted {
            return Ok(());
        }
        // Without it an event that is stored already would be decided on again: dial anew instead.
        let Ok(stored) = self.shared.store.outbox_stored(self.id(), epoch).await else {
            if let Some(sandbox) = self.state.sandbox().cloned() {
                self.dial(sandbox, epoch);
            }
            return Ok(());
        };
        let Opened { bridge, status, events } = opened;
        let events = crate::blobs::kept(&self.shared, self.id().clone(), bridge.clone(), events);
        self.link = Some(Link { bridge, epoch, events, stored, useful: false });
        // Known by the time it is decided what the machine does next.
        let changed = std::mem::replace(&mut self.detached, status.detached) != status.detached;
        self.input(Input::LinkUp { epoch, status }).await?;
        if changed { self.input(Input::Touched).await } else { Ok(()) }
    }

    /// Spawns a task that ends when the sandbox is no longer spoken with.
    pub(super) fn attach(&mut self, work: impl Future<Output = ()> + Send + 'static) {
        self.attached.retain(|task| !task.is_finished());
        self.attached.push(self.shared.spawn(work).abort_handle());
    }

    /// Stops speaking with the sandbox.
    pub(super) fn detach(&mut self) {
        for task in self.attached.drain(..) {
            task.abort();
        }
        self.link = None;
        self.redial = Duration::ZERO;
        self.door = None;
        self.freezer = None;
        self.detached = 0;
    }
}

async fn dial(shared: &Shared, session: &SessionId, sandbox: &SandboxId, epoch: u64) -> Note {
    let mut wait = FIRST_WAIT;
    loop {
        match open(shared, session, sandbox, epoch).await {
            Ok(opened) => return Note::Connected { epoch, opened: Box::new(opened) },
            // It never will be understood: what it holds is kept, and the session goes on in another.
            Err(error @ BridgeError::OtherVersion { .. }) => {
                tracing::warn!(%sandbox, %error, "a sandbox cannot be adopted");
                let reason = error.to_string();
                return Note::Input(Input::SandboxEnded { epoch, reason }, Vec::new());
            }
            Err(error) => tracing::debug!(%sandbox, error = words(&error), "cannot dial"),
        }
        match shared.provider.find(sandbox).await {
            Ok(Found::Dead { reason }) => {
                return Note::Input(Input::SandboxEnded { epoch, reason }, Vec::new());
            }
            Ok(Found::Gone) => return Note::Input(Input::FoundGone { epoch }, Vec::new()),
            Ok(Found::Running(_)) | Err(_) => {}
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

async fn open(
    shared: &Shared,
    session: &SessionId,
    sandbox: &SandboxId,
    epoch: u64,
) -> Result<Opened, BridgeError> {
    let stored = shared.store.outbox_stored(session, epoch).await.map_err(|error| {
        ProviderError::Machine {
            doing: "cannot read what is stored".to_owned(),
            source: Box::new(error),
        }
    })?;
    let stream = shared.provider.dial(sandbox).await?;
    let role = Role::Owner { lease: shared.lease.0, epoch, stored };
    Bridge::open(stream, role, Some(shared.config.clocks.pulse())).await
}

/// What an event means for the session, if anything.
fn input_of(epoch: u64, event: &OutboxEvent) -> Option<Input> {
    match &event.body {
        EventBody::BootPhase { phase: BootPhase::Ready, status: PhaseStatus::Done, .. } => {
            Some(Input::BootReady { epoch })
        }
        EventBody::BootPhase { phase, status: PhaseStatus::Failed, tail, .. } => {
            let phase = serde_json::to_string(phase).unwrap_or_default();
            let tail = tail.clone().unwrap_or_default();
            let detail = format!("phase {} failed\n{tail}", phase.trim_matches('"'));
            Some(Input::BootFailed { epoch, detail: detail.trim_end().to_owned() })
        }
        EventBody::TurnEnded { prompt, outcome, .. } => {
            Some(Input::TurnEnded { prompt: prompt.clone(), outcome: *outcome })
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
    fn a_connection_that_brings_nothing_is_dialled_less_and_less_often() {
        let mut waits = vec![Duration::ZERO];
        for _ in 0..10 {
            waits.push(wait_again(*waits.last().unwrap(), false));
        }
        assert_eq!((waits[1], waits[2], waits[10]), (FIRST_WAIT, 2 * FIRST_WAIT, LONGEST_WAIT));
        assert_eq!(wait_again(LONGEST_WAIT, true), Duration::ZERO);
    }
}
