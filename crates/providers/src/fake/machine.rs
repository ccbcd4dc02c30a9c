//! The inside of a fake sandbox: a disk, a boot, one turn at a time, an outbox.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use harvest_proto::{
    BlobId, EventBody, PromptId, Timestamp, TurnId,
    bridge::{Boot, Fault, FaultCode, OutboxEvent, PromptOrder, PromptProgress, Reply, Status},
    event::{Blob, BootPhase, PhaseStatus, TurnOutcome},
};
use tokio::sync::watch;

use super::{Boots, Files};

pub(crate) struct Machine {
    inside: Mutex<Inside>,
    /// Rises whenever something changes that a connection should look at.
    pulse: watch::Sender<u64>,
    runs: Arc<Mutex<Vec<PromptId>>>,
    boots: Boots,
}

#[derive(Default)]
struct Inside {
    files: Files,
    ended: Option<String>,
    still: bool,
    freezes: u64,
    detached: u32,
    boot: Option<Boot>,
    failed: bool,
    prompts: Vec<(PromptId, PromptProgress)>,
    turn: Option<Turn>,
    outbox: Vec<OutboxEvent>,
    last_event: u64,
    blobs: BTreeMap<BlobId, Vec<u8>>,
    lease: u64,
    owner: u64,
    cut: u64,
}

struct Turn {
    id: TurnId,
    prompt: PromptId,
    deaf: bool,
    request: Option<String>,
}

impl Machine {
    pub(crate) fn new(files: Files, runs: Arc<Mutex<Vec<PromptId>>>, boots: Boots) -> Self {
        let inside = Inside { files, ..Inside::default() };
        Self { inside: Mutex::new(inside), pulse: watch::Sender::new(0), runs, boots }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("no holder of this lock can panic")
    }

    fn beat(&self) {
        self.pulse.send_modify(|count| *count += 1);
    }

    pub(crate) fn pulse(&self) -> watch::Receiver<u64> {
        self.pulse.subscribe()
    }

    pub(crate) fn files(&self) -> Files {
        self.inside().files.clone()
    }

    pub(crate) fn blob(&self, id: &BlobId) -> Option<Vec<u8>> {
        self.inside().blobs.get(id).cloned()
    }

    pub(crate) fn write(&self, path: &str, bytes: Vec<u8>) {
        self.inside().files.insert(path.to_owned(), bytes);
    }

    pub(crate) fn booted(&self) -> Option<Boot> {
        self.inside().boot.clone()
    }

    pub(crate) fn ended(&self) -> Option<String> {
        self.inside().ended.clone()
    }

    pub(crate) fn is_still(&self) -> bool {
        self.inside().still
    }

    /// How often somebody has asked for standing still: who sees this rise was renewed.
    pub(crate) fn freezes(&self) -> u64 {
        self.inside().freezes
    }

    pub(crate) fn set_still(&self, still: bool) {
        {
            let mut inside = self.inside();
            inside.still = still;
            inside.freezes += u64::from(still);
        }
        self.beat();
    }

    pub(crate) fn die(&self, reason: &str) {
        self.inside().ended.get_or_insert_with(|| reason.to_owned());
        self.beat();
    }

    pub(crate) async fn wait(&self) -> String {
        let mut pulse = self.pulse();
        loop {
            if let Some(reason) = self.ended() {
                return reason;
            }
            if pulse.changed().await.is_err() {
                return "gone".to_owned();
            }
        }
    }

    pub(crate) fn drop_connections(&self) {
        self.inside().cut += 1;
        self.beat();
    }

    /// How often connections have been cut: one that sees this rise is closed.
    pub(crate) fn cuts(&self) -> u64 {
        self.inside().cut
    }

    /// The owner's number: one that sees another is closed.
    pub(crate) fn owner(&self) -> u64 {
        self.inside().owner
    }

    /// Takes ownership; `None` when a newer server has it, or the sandbox is another epoch's.
    pub(crate) fn own(&self, lease: u64, epoch: u64, stored: u64) -> Option<u64> {
        let number = {
            let mut inside = self.inside();
            let other = inside.boot.as_ref().is_some_and(|boot| boot.epoch != epoch);
            if lease < inside.lease || other {
                return None;
            }
            inside.lease = lease;
            inside.owner += 1;
            inside.outbox.retain(|event| event.number > stored);
            inside.owner
        };
        self.beat();
        Some(number)
    }

    pub(crate) fn status(&self) -> Status {
        let inside = self.inside();
        Status {
            phase: inside
                .boot
                .as_ref()
                .map(|_| if inside.failed { BootPhase::Setup } else { BootPhase::Ready }),
            failed: inside.failed,
            prompts: inside.prompts.clone(),
            last_event: inside.last_event,
            detached: inside.detached,
        }
    }

    pub(crate) fn detached(&self) -> u32 {
        self.inside().detached
    }

    pub(crate) fn set_detached(&self, count: u32) {
        self.inside().detached = count;
        self.beat();
    }

    pub(crate) fn events_after(&self, number: u64) -> Vec<OutboxEvent> {
        self.inside().outbox.iter().filter(|event| event.number > number).cloned().collect()
    }

    pub(crate) fn stored(&self, upto: u64) {
        self.inside().outbox.retain(|event| event.number > upto);
    }

    pub(crate) fn boot(&self, boot: Boot) -> Result<Reply, Fault> {
        let mut inside = self.inside();
        if inside.boot.is_some() {
            return Ok(Reply::Done);
        }
        inside.boot = Some(boot);
        inside.failed = self.boots == Boots::Failing;
        inside.phase(BootPhase::Starting, PhaseStatus::Done);
        match self.boots {
            Boots::Good => inside.phase(BootPhase::Ready, PhaseStatus::Done),
            Boots::Failing => inside.phase(BootPhase::Setup, PhaseStatus::Failed),
            Boots::Hanging => {}
        }
        drop(inside);
        self.beat();
        Ok(Reply::Done)
    }

    pub(crate) fn prompt(&self, order: PromptOrder) -> Result<Reply, Fault> {
        let mut inside = self.inside();
        if inside.boot.is_none() || inside.failed {
            return Err(Fault::new(FaultCode::NotReady, "not booted"));
        }
        if inside.prompts.iter().any(|(seen, _)| *seen == order.prompt) {
            return Ok(Reply::Done);
        }
        if inside.turn.is_some() {
            return Err(Fault::new(FaultCode::Busy, "a turn is in progress"));
        }
        if order.text == "refuse" {
            return Err(Fault::new(
                FaultCode::NotReady,
                "the agent crashed and is not started again",
            ));
        }
        // A real one would hang; a mistake in the order of things is better seen.
        if inside.still {
            return Err(Fault::new(FaultCode::System, "everything stands still"));
        }
        self.runs.lock().expect("no holder of this lock can panic").push(order.prompt.clone());
        inside.begin(&order);
        drop(inside);
        self.beat();
        Ok(Reply::Done)
    }

    pub(crate) fn release(&self) {
        self.inside().end(TurnOutcome::Completed);
        self.beat();
    }

    pub(crate) fn stop(&self, turn: &TurnId) -> Result<Reply, Fault> {
        let mut inside = self.inside();
        match &inside.turn {
            Some(current) if current.id == *turn => {
                if !current.deaf {
                    inside.end(TurnOutcome::Stopped);
                }
            }
            _ => return Err(Fault::new(FaultCode::NotFound, "no such turn")),
        }
        drop(inside);
        self.beat();
        Ok(Reply::Done)
    }

    pub(crate) fn answer(&self, request: &str, answer: String) -> Result<Reply, Fault> {
        let mut inside = self.inside();
        let open =
            inside.turn.as_mut().and_then(|turn| turn.request.take_if(|open| open == request));
        if open.is_none() {
            return Err(Fault::new(FaultCode::NotFound, "nobody asks that"));
        }
        inside
            .event(EventBody::RequestClosed { request: request.to_owned(), answer: Some(answer) });
        inside.end(TurnOutcome::Completed);
        drop(inside);
        self.beat();
        Ok(Reply::Done)
    }
}

impl Inside {
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
        let tail = (status == PhaseStatus::Failed).then(|| "told to fail".to_owned());
        self.event(EventBody::BootPhase { phase, status, millis: Some(1), tail });
    }

    fn begin(&mut self, order: &PromptOrder) {
        let mut words = order.text.splitn(3, ' ');
        let verb = words.next().unwrap_or_default();
        self.prompts.push((order.prompt.clone(), PromptProgress::Running));
        self.turn = Some(Turn {
            id: order.turn.clone(),
            prompt: order.prompt.clone(),
            deaf: verb == "deaf",
            request: None,
        });
        self.event(EventBody::TurnStarted { prompt: order.prompt.clone(), number: order.number });
        match verb {
            "hold" | "deaf" => {}
            "fail" => self.end(TurnOutcome::Failed),
            // Says so many bytes, of which it holds as many as it says, or another number.
            "long" => {
                let mut number = || words.next().and_then(|word| word.parse().ok());
                let bytes: usize = number().unwrap_or_default();
                let held = number().unwrap_or(bytes);
                self.say_long(bytes as u64, held);
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
            _ => {
                self.event(EventBody::TextDelta { text: order.text.clone() });
                self.end(TurnOutcome::Completed);
            }
        }
    }

    fn say_long(&mut self, bytes: u64, held: usize) {
        let id = BlobId::random();
        self.blobs.insert(id.clone(), vec![b'x'; held]);
        let (call, output) = ("long".to_owned(), "x…x".to_owned());
        self.event(EventBody::ToolEnded { call, ok: true, output, blob: Some(Blob { id, bytes }) });
    }

    fn end(&mut self, outcome: TurnOutcome) {
        let Some(turn) = &mut self.turn else { return };
        let (prompt, open) = (turn.prompt.clone(), turn.request.take());
        if let Some(request) = open {
            self.event(EventBody::RequestClosed { request, answer: None });
        }
        for (seen, progress) in &mut self.prompts {
            if *seen == prompt {
                *progress = PromptProgress::Ended;
            }
        }
        self.event(EventBody::TurnEnded { prompt, outcome, error: None, millis: 1 });
        self.turn = None;
    }
}
