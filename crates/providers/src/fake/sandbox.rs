//! The state of a fake sandbox: its disk, boot, current turn and outbox.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use harvest_proto::{
    BlobId, EventBody, PromptId, Timestamp, TurnId,
    bridge::{
        Boot, Fault, FaultCode, OutboxEvent, PromptProgress, Reply, Status, SyncRequest,
        SyncTarget, TurnRequest,
    },
    event::{
        Blob, BootFailure, BootPhase, CheckoutSync, CommittedWork, PhaseStatus, SyncOutcome,
        TurnOutcome,
    },
};
use harvest_session::sandboxes::ComputeUsage;
use tokio::sync::watch;

use super::{BootBehavior, Files, SYNC_FILE};

pub(crate) struct FakeSandbox {
    state: Mutex<SandboxContent>,
    /// Incremented on every change that connections must notice.
    changes: watch::Sender<u64>,
    prompts_run: Arc<Mutex<Vec<PromptId>>>,
    boot: BootBehavior,
}

#[derive(Default)]
struct SandboxContent {
    files: Files,
    ended: Option<String>,
    frozen: bool,
    freezes: u64,
    detached: u32,
    /// The order to stand by, if there was one, and the one for a session.
    boots: Vec<Boot>,
    /// The sandbox has its session's order, and was frozen when that came.
    ready_when_thawed: bool,
    failed: bool,
    prompts: Vec<(PromptId, PromptProgress)>,
    turn: Option<FakeTurn>,
    outbox: Vec<OutboxEvent>,
    last_event: u64,
    blobs: BTreeMap<BlobId, Vec<u8>>,
    lease: u64,
    owner: u64,
    cuts: u64,
    cpu_micros: u64,
}

struct FakeTurn {
    id: TurnId,
    prompt: PromptId,
    deaf: bool,
    request: Option<String>,
    /// Why it fails.
    error: Option<String>,
}

impl FakeSandbox {
    pub(crate) fn new(
        files: Files,
        prompts_run: Arc<Mutex<Vec<PromptId>>>,
        boot: BootBehavior,
    ) -> Self {
        let state = SandboxContent { files, ..SandboxContent::default() };
        Self { state: Mutex::new(state), changes: watch::Sender::new(0), prompts_run, boot }
    }

    fn lock(&self) -> MutexGuard<'_, SandboxContent> {
        self.state.lock().expect("no holder of this lock can panic")
    }

    fn notify(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(crate) fn files(&self) -> Files {
        self.lock().files.clone()
    }

    pub(crate) fn blob(&self, id: &BlobId) -> Option<Vec<u8>> {
        self.lock().blobs.get(id).cloned()
    }

    pub(crate) fn write(&self, path: &str, bytes: Vec<u8>) {
        self.lock().files.insert(path.to_owned(), bytes);
    }

    pub(crate) fn boots(&self) -> Vec<Boot> {
        self.lock().boots.clone()
    }

    pub(crate) fn ended(&self) -> Option<String> {
        self.lock().ended.clone()
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.lock().frozen
    }

    /// The number of freeze requests; a higher number means the freeze was renewed.
    pub(crate) fn freezes(&self) -> u64 {
        self.lock().freezes
    }

    pub(crate) fn set_frozen(&self, frozen: bool) {
        {
            let mut state = self.lock();
            state.frozen = frozen;
            state.freezes += u64::from(frozen);
            if !frozen && std::mem::take(&mut state.ready_when_thawed) {
                state.phase(BootPhase::Ready, PhaseStatus::Done);
            }
        }
        self.notify();
    }

    pub(crate) fn die(&self, reason: &str) {
        self.lock().ended.get_or_insert_with(|| reason.to_owned());
        self.notify();
    }

    pub(crate) async fn wait(&self) -> String {
        let mut changes = self.changes();
        loop {
            if let Some(reason) = self.ended() {
                return reason;
            }
            if changes.changed().await.is_err() {
                return "gone".to_owned();
            }
        }
    }

    pub(crate) fn drop_connections(&self) {
        self.lock().cuts += 1;
        self.notify();
    }

    /// A command uses a millisecond of CPU time, and a sandbox 64 MiB.
    pub(crate) fn usage(&self) -> ComputeUsage {
        let state = self.lock();
        let memory_bytes = if state.ended.is_some() { 0 } else { 64 << 20 };
        ComputeUsage { cpu_micros: state.cpu_micros, memory_bytes }
    }

    pub(crate) fn use_cpu(&self, micros: u64) {
        self.lock().cpu_micros += micros;
    }

    /// The number of connection cuts; a connection closes when it changes.
    pub(crate) fn cuts(&self) -> u64 {
        self.lock().cuts
    }

    /// The number of the current owner; a connection of an earlier owner closes.
    pub(crate) fn owner(&self) -> u64 {
        self.lock().owner
    }

    /// Takes ownership; `None` when a newer server owns the sandbox or the epoch differs.
    pub(crate) fn own(&self, lease: u64, epoch: u64, stored: u64) -> Option<u64> {
        let number = {
            let mut state = self.lock();
            let other = state.boots.iter().any(|boot| boot.epoch != epoch);
            if lease < state.lease || other {
                return None;
            }
            state.lease = lease;
            state.owner += 1;
            state.outbox.retain(|event| event.number > stored);
            state.owner
        };
        self.notify();
        Some(number)
    }

    pub(crate) fn status(&self) -> Status {
        let state = self.lock();
        Status {
            phase: state
                .boots
                .last()
                .map(|_| if state.failed { BootPhase::Setup } else { BootPhase::Ready }),
            failed: state.failed,
            prompts: state.prompts.clone(),
            last_event: state.last_event,
            detached: state.detached,
        }
    }

    pub(crate) fn detached(&self) -> u32 {
        self.lock().detached
    }

    pub(crate) fn set_detached(&self, count: u32) {
        self.lock().detached = count;
        self.notify();
    }

    pub(crate) fn events_after(&self, number: u64) -> Vec<OutboxEvent> {
        self.lock().outbox.iter().filter(|event| event.number > number).cloned().collect()
    }

    pub(crate) fn stored(&self, upto: u64) {
        self.lock().outbox.retain(|event| event.number > upto);
    }

    pub(crate) fn boot(&self, boot: Boot) -> Result<Reply, Fault> {
        let mut state = self.lock();
        let stood_by = state.boots.last().is_some_and(|last| last.standby);
        let standby = boot.standby;
        if !state.boots.is_empty() && (!stood_by || standby) {
            return Ok(Reply::Done);
        }
        if state.boots.iter().any(|first| first.session != boot.session) {
            return Err(Fault::invalid("this sandbox belongs to another session"));
        }
        state.boots.push(boot);
        state.failed = self.boot == BootBehavior::Failing;
        if !stood_by {
            state.phase(BootPhase::Starting, PhaseStatus::Done);
        }
        match self.boot {
            BootBehavior::Succeeding if standby => state.phase(BootPhase::Agent, PhaseStatus::Done),
            // Git and the agent are frozen.
            BootBehavior::Succeeding if state.frozen => state.ready_when_thawed = true,
            BootBehavior::Succeeding => state.phase(BootPhase::Ready, PhaseStatus::Done),
            BootBehavior::Failing => state.phase(BootPhase::Setup, PhaseStatus::Failed),
            BootBehavior::Hanging => {}
        }
        drop(state);
        self.notify();
        Ok(Reply::Done)
    }

    pub(crate) fn prompt(&self, order: TurnRequest) -> Result<Reply, Fault> {
        let mut state = self.lock();
        if state.boots.last().is_none_or(|boot| boot.standby) || state.failed {
            return Err(Fault::new(FaultCode::NotReady, "not booted"));
        }
        if state.prompts.iter().any(|(seen, _)| *seen == order.prompt) {
            return Ok(Reply::Done);
        }
        if order.text.starts_with("forgotten") && order.history.is_none() {
            return Err(Fault::new(FaultCode::NeedsHistory, "no memory"));
        }
        if state.turn.is_some() {
            return Err(Fault::new(FaultCode::Busy, "a turn is in progress"));
        }
        if order.text == "refuse" {
            return Err(Fault::new(FaultCode::NotReady, "the agent crashed and is not restarted"));
        }
        // A real sandbox would hang; an error shows the mistake in a test.
        if state.frozen {
            return Err(Fault::new(FaultCode::System, "the sandbox is frozen"));
        }
        self.prompts_run
            .lock()
            .expect("no holder of this lock can panic")
            .push(order.prompt.clone());
        state.begin(&order);
        drop(state);
        self.notify();
        Ok(Reply::Done)
    }

    pub(crate) fn sync(&self, request: &SyncRequest) -> Result<Reply, Fault> {
        let mut state = self.lock();
        if state.turn.is_some() {
            return Err(Fault::new(FaultCode::Busy, "a turn is in progress"));
        }
        let outcome = state.files.get(SYNC_FILE).and_then(|bytes| std::str::from_utf8(bytes).ok());
        let outcome = outcome.and_then(|word| word.parse().ok()).unwrap_or(SyncOutcome::UpToDate);
        let synced = |target: &SyncTarget| synced_checkout(target, outcome);
        let checkouts = request.checkouts.iter().map(synced).collect();
        state.event(EventBody::SyncEnded { checkouts, millis: 1 });
        drop(state);
        self.notify();
        Ok(Reply::Done)
    }

    pub(crate) fn finish_turn(&self) {
        self.lock().end(TurnOutcome::Completed);
        self.notify();
    }

    pub(crate) fn stop(&self, turn: &TurnId) -> Result<Reply, Fault> {
        let mut state = self.lock();
        match &state.turn {
            Some(current) if current.id == *turn => {
                if !current.deaf {
                    state.end(TurnOutcome::Stopped);
                }
            }
            _ => return Err(Fault::new(FaultCode::NotFound, "no such turn")),
        }
        drop(state);
        self.notify();
        Ok(Reply::Done)
    }

    pub(crate) fn answer(&self, request: &str, answer: String) -> Result<Reply, Fault> {
        let mut state = self.lock();
        let open =
            state.turn.as_mut().and_then(|turn| turn.request.take_if(|open| open == request));
        if open.is_none() {
            return Err(Fault::new(FaultCode::NotFound, "no such question"));
        }
        state.event(EventBody::RequestClosed { request: request.to_owned(), answer: Some(answer) });
        state.end(TurnOutcome::Completed);
        drop(state);
        self.notify();
        Ok(Reply::Done)
    }
}

fn synced_checkout(target: &SyncTarget, outcome: SyncOutcome) -> CheckoutSync {
    let is = |wanted| outcome == wanted;
    CheckoutSync {
        repository: target.checkout.name.clone(),
        outcome,
        branch: None,
        upstream: Some("origin/main".to_owned()),
        before: Some("b".repeat(40)),
        after: Some("a".repeat(40)),
        base: Some("c".repeat(40)),
        work: CommittedWork::default(),
        checkpoint: is(SyncOutcome::Conflict).then(|| "checkpoint-x-1".to_owned()),
        conflicts: is(SyncOutcome::Conflict).then(|| "README".to_owned()).into_iter().collect(),
        commit: is(SyncOutcome::Conflict).then(|| "b0b Mine".to_owned()),
        error: is(SyncOutcome::Failed).then(|| "no answer".to_owned()),
        next: None,
    }
}

impl SandboxContent {
    fn event(&mut self, body: EventBody) {
        self.last_event += 1;
        self.outbox.push(OutboxEvent {
            number: self.last_event,
            at: Timestamp::from_millis(0),
            turn: self.turn.as_ref().map(|turn| turn.id.clone()),
            body,
        });
    }

    fn phase(&mut self, phase: BootPhase, status: PhaseStatus) {
        let tail = (status == PhaseStatus::Failed).then(|| "made to fail by the test".to_owned());
        let failure = tail.clone().map(|message| BootFailure {
            message,
            permanent: false,
            start_over: false,
        });
        self.event(EventBody::BootPhase { phase, status, millis: Some(1), tail, failure });
    }

    fn begin(&mut self, order: &TurnRequest) {
        let mut words = order.text.splitn(3, ' ');
        let verb = words.next().unwrap_or_default();
        self.prompts.push((order.prompt.clone(), PromptProgress::Running));
        self.turn = Some(FakeTurn {
            id: order.turn.clone(),
            prompt: order.prompt.clone(),
            deaf: verb == "deaf",
            request: None,
            error: (verb == "fail").then(|| order.text.clone()),
        });
        self.event(EventBody::TurnStarted { prompt: order.prompt.clone(), number: order.number });
        match verb {
            "hold" | "deaf" => {}
            "fail" => self.end(TurnOutcome::Failed),
            // `long BYTES [STORED]`: announces BYTES, but stores STORED when given.
            "long" => {
                let mut number = || words.next().and_then(|word| word.parse().ok());
                let bytes: usize = number().unwrap_or_default();
                let stored = number().unwrap_or(bytes);
                self.emit_blob(bytes as u64, stored);
                self.end(TurnOutcome::Completed);
            }
            "ask" => {
                let request = format!("ask-{}", order.number);
                if let Some(turn) = &mut self.turn {
                    turn.request = Some(request.clone());
                }
                let question = order.text.clone();
                self.event(EventBody::RequestOpened { request, question, options: Vec::new() });
            }
            "write" => {
                let path = words.next().unwrap_or_default().to_owned();
                self.files.insert(path, words.next().unwrap_or_default().as_bytes().to_vec());
                self.end(TurnOutcome::Completed);
            }
            "forgotten" => {
                for past in order.history.iter().flatten() {
                    let text = format!("{:?} {}\n", past.from, past.text);
                    self.event(EventBody::TextDelta { text });
                }
                self.end(TurnOutcome::Completed);
            }
            "options" => {
                let launch = order.agent.as_deref();
                let options = launch.map(|launch| (&launch.name, &launch.model, launch.effort));
                self.event(EventBody::TextDelta { text: format!("{options:?}\n") });
                self.end(TurnOutcome::Completed);
            }
            _ => {
                self.event(EventBody::TextDelta { text: order.text.clone() });
                self.end(TurnOutcome::Completed);
            }
        }
    }

    fn emit_blob(&mut self, bytes: u64, stored: usize) {
        let id = BlobId::random();
        self.blobs.insert(id.clone(), vec![b'x'; stored]);
        let (call, output) = ("long".to_owned(), "x…x".to_owned());
        self.event(EventBody::ToolEnded { call, ok: true, output, blob: Some(Blob { id, bytes }) });
    }

    fn end(&mut self, outcome: TurnOutcome) {
        let Some(turn) = &mut self.turn else { return };
        let (prompt, open) = (turn.prompt.clone(), turn.request.take());
        let error = turn.error.take();
        if let Some(request) = open {
            self.event(EventBody::RequestClosed { request, answer: None });
        }
        for (seen, progress) in &mut self.prompts {
            if *seen == prompt {
                *progress = PromptProgress::Ended;
            }
        }
        self.event(EventBody::TurnEnded { prompt, outcome, reason: None, error, millis: 1 });
        self.turn = None;
    }
}
