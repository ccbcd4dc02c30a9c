//! Holds events until the owner has stored them. Events are numbered from 1 for the life of the
//! sandbox; after a reconnect, all events after the owner's last stored number are sent again; none
//! is dropped.
//!
//! Backpressure bounds its size: the agent's output is read only after [`Outbox::wait_for_space`],
//! so the agent's pipe fills and the agent blocks. Blobs are held with their events and count.

mod fit;

use std::{cell::RefCell, collections::VecDeque, rc::Rc, time::SystemTime};

use harvest_proto::{BlobId, EventBody, Timestamp, TurnId, bridge::OutboxEvent};
use tokio::sync::Notify;

// Minutes of an agent's output while the server is away. At most one line of the agent exceeds it.
const MAX_BYTES: usize = 2 * 1024 * 1024;

// Memory that an event takes besides its content: about this much.
const EVENT_BYTES: usize = 256;

// Consecutive text deltas are merged up to this size, and longer ones are split.
const MAX_DELTA_BYTES: usize = 16 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: RefCell<Queue>,
    /// Notified when there is something new to send.
    pub(crate) changed: Notify,
    freed: Notify,
}

impl Outbox {
    pub(crate) fn new() -> Rc<Self> {
        Rc::default()
    }

    pub(crate) fn push(&self, turn: Option<&TurnId>, body: EventBody) {
        let at = Timestamp::from(SystemTime::now());
        for (body, full) in fit::fit(body) {
            self.queue.borrow_mut().push(at, turn, body, full.map(Rc::from));
        }
        self.changed.notify_waiters();
    }

    /// Whether the agent's output may be read.
    pub(crate) fn has_space(&self) -> bool {
        self.queue.borrow().bytes < MAX_BYTES
    }

    /// Waits until the agent's output may be read.
    pub(crate) async fn wait_for_space(&self) {
        loop {
            // Registered before the check: otherwise an `EventsStored` in between would be missed.
            let freed = self.freed.notified();
            if self.has_space() {
                return;
            }
            freed.await;
        }
    }

    /// A new owner has stored everything up to `stored`; later events are sent again.
    pub(crate) fn reconnect(&self, stored: u64) {
        self.stored(stored);
        self.queue.borrow_mut().sent = 0;
        self.changed.notify_waiters();
    }

    /// The owner has stored everything up to `upto`.
    pub(crate) fn stored(&self, upto: u64) {
        self.queue.borrow_mut().stored(upto);
        self.freed.notify_waiters();
    }

    /// The next event to send on this connection.
    pub(crate) fn next(&self) -> Option<OutboxEvent> {
        self.queue.borrow_mut().next()
    }

    /// The full text of a blob whose event has not been stored yet.
    pub(crate) fn blob(&self, id: &BlobId) -> Option<Rc<str>> {
        let queue = self.queue.borrow();
        let has_id =
            |entry: &&QueuedEvent| entry.event.body.blob().is_some_and(|blob| blob.id == *id);
        queue.events.iter().find(has_id)?.full.clone()
    }

    /// The highest number assigned.
    pub(crate) fn last(&self) -> u64 {
        self.queue.borrow().last
    }
}

#[derive(Debug)]
struct QueuedEvent {
    event: OutboxEvent,
    full: Option<Rc<str>>,
    size: usize,
}

#[derive(Debug, Default)]
struct Queue {
    /// All events that are not stored, in order.
    events: VecDeque<QueuedEvent>,
    /// How many of `events` were sent on this connection.
    sent: usize,
    /// How many of `events` were ever sent: they must not change any more.
    ever_sent: usize,
    last: u64,
    bytes: usize,
}

impl Queue {
    fn push(
        &mut self,
        at: Timestamp,
        turn: Option<&TurnId>,
        body: EventBody,
        full: Option<Rc<str>>,
    ) {
        if self.merge(turn, &body) {
            return;
        }
        let (body, bytes) = fit::or_warning(body);
        self.last += 1;
        let event = OutboxEvent { number: self.last, at, turn: turn.cloned(), body };
        let size = EVENT_BYTES + bytes + full.as_ref().map_or(0, |full| full.len());
        self.bytes += size;
        self.events.push_back(QueuedEvent { event, full, size });
    }

    fn merge(&mut self, turn: Option<&TurnId>, body: &EventBody) -> bool {
        let Some(QueuedEvent { event: last, size, .. }) =
            self.events.range_mut(self.ever_sent..).last()
        else {
            return false;
        };
        let (text, delta) = match (&mut last.body, body) {
            (EventBody::TextDelta { text }, EventBody::TextDelta { text: delta })
            | (EventBody::ThoughtDelta { text }, EventBody::ThoughtDelta { text: delta }) => {
                (text, delta)
            }
            (
                EventBody::ToolOutput { call, text },
                EventBody::ToolOutput { call: same, text: delta },
            ) if call == same => (text, delta),
            _ => return false,
        };
        if last.turn.as_ref() != turn || text.len() + delta.len() > MAX_DELTA_BYTES {
            return false;
        }
        text.push_str(delta);
        *size += delta.len();
        self.bytes += delta.len();
        true
    }

    fn next(&mut self) -> Option<OutboxEvent> {
        let event = self.events.get(self.sent)?.event.clone();
        self.sent += 1;
        self.ever_sent = self.ever_sent.max(self.sent);
        Some(event)
    }

    fn stored(&mut self, upto: u64) {
        while self.ever_sent > 0
            && self.events.front().is_some_and(|entry| entry.event.number <= upto)
        {
            if let Some(entry) = self.events.pop_front() {
                self.bytes -= entry.size;
            }
            self.sent = self.sent.saturating_sub(1);
            self.ever_sent -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum TestStep {
        Text(String),
        Other,
        /// A tool writes this many bytes.
        Output(usize),
        Send,
        /// The owner stores the received events and acknowledges them.
        Store,
        /// The connection drops, with or without the last `EventsStored` having arrived.
        Reconnect,
    }

    fn step() -> impl Strategy<Value = TestStep> {
        prop_oneof![
            "[a-z]{1,4}".prop_map(TestStep::Text),
            Just(TestStep::Other),
            (0usize..200_000).prop_map(TestStep::Output),
            Just(TestStep::Send),
            Just(TestStep::Send),
            Just(TestStep::Store),
            Just(TestStep::Reconnect),
        ]
    }

    #[derive(Default)]
    struct Owner {
        received: Vec<OutboxEvent>,
        /// The full length of each tool's output, in order.
        outputs: Vec<usize>,
    }

    impl Owner {
        // As the server does: a known number is ignored.
        fn receive(&mut self, outbox: &Outbox, event: OutboxEvent) {
            let known = self.received.len() as u64;
            assert!(event.number <= known + 1, "a gap before {}", event.number);
            if event.number == known + 1 {
                if let EventBody::ToolEnded { output, blob, .. } = &event.body {
                    let full = blob.as_ref().map(|blob| outbox.blob(&blob.id).unwrap());
                    assert_eq!(
                        blob.as_ref().map(|blob| blob.bytes),
                        full.as_ref().map(|full| full.len() as u64)
                    );
                    self.outputs.push(full.map_or(output.len(), |full| full.len()));
                }
                self.received.push(event);
            } else {
                let index = usize::try_from(event.number - 1).unwrap();
                assert_eq!(
                    self.received[index].body, event.body,
                    "an event changed after it was sent"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn owner_gets_every_event_once_in_order(steps in proptest::collection::vec(step(), 0..80)) {
            let outbox = Outbox::new();
            let mut owner = Owner::default();
            let (mut pushed_text, mut outputs) = (String::new(), Vec::new());
            for step in steps {
                match step {
                    TestStep::Text(text) => {
                        pushed_text.push_str(&text);
                        outbox.push(None, EventBody::TextDelta { text });
                    }
                    TestStep::Other => {
                        pushed_text.push('|');
                        outbox.push(None, EventBody::Compacted {});
                    }
                    TestStep::Output(bytes) => {
                        pushed_text.push('#');
                        outputs.push(bytes);
                        outbox.push(None, output(bytes));
                    }
                    TestStep::Send => {
                        if let Some(event) = outbox.next() {
                            owner.receive(&outbox, event);
                        }
                    }
                    TestStep::Store => outbox.stored(owner.received.len() as u64),
                    TestStep::Reconnect => outbox.reconnect(owner.received.len() as u64),
                }
            }
            outbox.reconnect(owner.received.len() as u64);
            while let Some(event) = outbox.next() {
                owner.receive(&outbox, event);
            }
            let received: String = owner.received.iter().map(|event| match &event.body {
                EventBody::TextDelta { text } => text.clone(),
                EventBody::ToolEnded { .. } => "#".to_owned(),
                _ => "|".to_owned(),
            }).collect();
            prop_assert_eq!(received, pushed_text);
            prop_assert_eq!(&owner.outputs, &outputs);
            prop_assert_eq!(outbox.last(), owner.received.len() as u64);
            outbox.stored(outbox.last());
            prop_assert_eq!(outbox.queue.borrow().bytes, 0);
        }
    }

    fn output(bytes: usize) -> EventBody {
        EventBody::ToolEnded { call: "c".into(), ok: true, output: "x".repeat(bytes), blob: None }
    }

    fn has_space(outbox: &Outbox) -> bool {
        use std::{future::Future, pin::pin, task};
        let mut context = task::Context::from_waker(task::Waker::noop());
        pin!(outbox.wait_for_space()).poll(&mut context).is_ready()
    }

    #[test]
    fn full_outbox_blocks_until_an_event_is_stored() {
        let outbox = Outbox::new();
        let mut pushed = 0;
        while has_space(&outbox) {
            outbox.push(None, output(30_000));
            pushed += 1;
            assert!(pushed <= MAX_BYTES / 30_000 + 1, "the outbox exceeds its limit");
        }
        outbox.next();
        assert!(!has_space(&outbox), "sent is not stored");
        outbox.stored(1);
        assert!(has_space(&outbox));
    }

    #[test]
    fn blob_takes_space_until_its_event_is_stored() {
        let outbox = Outbox::new();
        outbox.push(None, output(MAX_BYTES));
        assert!(!has_space(&outbox));
        let event = outbox.next().unwrap();
        let id = event.body.blob().unwrap().id.clone();
        assert_eq!(outbox.blob(&id).unwrap().len(), MAX_BYTES);
        outbox.reconnect(0);
        assert_eq!(outbox.next(), Some(event), "the same blob again");
        outbox.stored(1);
        assert!(has_space(&outbox) && outbox.blob(&id).is_none());
    }

    #[test]
    fn live_output_is_merged_per_call() {
        let outbox = Outbox::new();
        for (call, text) in [("a", "1"), ("a", "2"), ("b", "3"), ("a", "4")] {
            outbox.push(None, EventBody::ToolOutput { call: call.into(), text: text.into() });
        }
        let bodies: Vec<_> = std::iter::from_fn(|| outbox.next()).map(|event| event.body).collect();
        let output =
            |call: &str, text: &str| EventBody::ToolOutput { call: call.into(), text: text.into() };
        assert_eq!(bodies, [output("a", "12"), output("b", "3"), output("a", "4")]);
        outbox.stored(3);
        assert_eq!(outbox.queue.borrow().bytes, 0);
    }

    #[test]
    fn oversized_event_becomes_a_warning() {
        let outbox = Outbox::new();
        let body = EventBody::PromptQueued {
            prompt: harvest_proto::PromptId::random(),
            text: "x".repeat(2 * 1024 * 1024),
            author: String::new(),
            attachments: Vec::new(),
        };
        outbox.push(None, body);
        let event = outbox.next().unwrap();
        assert!(
            matches!(&event.body, EventBody::Warning { message } if message.contains("2097")),
            "{event:?}"
        );
    }

    #[test]
    fn unknown_stored_number_drops_nothing() {
        let outbox = Outbox::new();
        outbox.push(None, EventBody::Compacted {});
        outbox.reconnect(99);
        assert_eq!(outbox.next().unwrap().number, 1);
    }
}
