//! Holds events until the owner has stored them. Numbers them 1, 2, 3… for the life of the sandbox,
//! sends what follows the owner's last stored number after every reconnect, never drops one.
//!
//! It is bounded by its sources: whoever reads the agent waits for [`Outbox::room`] first, so the agent's
//! own pipe fills and it waits in turn. Blobs wait here with their events and count.

mod long;

use std::{cell::RefCell, collections::VecDeque, rc::Rc, time::SystemTime};

use harvest_proto::{BlobId, EventBody, Timestamp, TurnId, bridge::OutboxEvent};
use tokio::sync::Notify;

// What a sandbox may pile up while its server is away before its agent has to wait: minutes of an agent's
// talk. One line of the agent comes on top, at most.
const MAX_BYTES: usize = 2 * 1024 * 1024;

// Neighbouring pieces of text become one event up to this, and longer ones are cut.
const MAX_PIECE_BYTES: usize = 16 * 1024;

/// The events on their way out.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: RefCell<Queue>,
    /// Rung when there is something new to send.
    pub(crate) news: Notify,
    freed: Notify,
}

impl Outbox {
    pub(crate) fn new() -> Rc<Self> {
        Rc::default()
    }

    /// Adds an event.
    pub(crate) fn push(&self, turn: Option<&TurnId>, body: EventBody) {
        let at = Timestamp::from(SystemTime::now());
        for (body, whole) in long::fit(body) {
            self.queue.borrow_mut().push(at, turn, body, whole.map(Rc::from));
        }
        self.news.notify_waiters();
    }

    /// Waits until the agent may be read on.
    pub(crate) async fn room(&self) {
        loop {
            // Registered before looking, else an `EventsStored` in between would go unnoticed.
            let freed = self.freed.notified();
            if self.queue.borrow().bytes < MAX_BYTES {
                return;
            }
            freed.await;
        }
    }

    /// A new owner has stored everything up to `stored`; what follows is sent again.
    pub(crate) fn reconnect(&self, stored: u64) {
        self.stored(stored);
        self.queue.borrow_mut().sent = 0;
        self.news.notify_waiters();
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

    /// The whole of what an event that is not stored yet holds the ends of.
    pub(crate) fn blob(&self, id: &BlobId) -> Option<Rc<str>> {
        let queue = self.queue.borrow();
        let named = |entry: &&Entry| entry.event.body.blob().is_some_and(|blob| blob.id == *id);
        queue.events.iter().find(named)?.whole.clone()
    }

    /// The highest number given out.
    pub(crate) fn last(&self) -> u64 {
        self.queue.borrow().last
    }
}

#[derive(Debug)]
struct Entry {
    event: OutboxEvent,
    whole: Option<Rc<str>>,
    size: usize,
}

#[derive(Debug, Default)]
struct Queue {
    /// Everything not stored yet, in order.
    events: VecDeque<Entry>,
    /// How many of `events` this connection has been sent.
    sent: usize,
    /// How many at the front any connection has been sent: their numbers are known outside, so
    /// they may not change any more.
    shown: usize,
    last: u64,
    bytes: usize,
}

impl Queue {
    fn push(
        &mut self,
        at: Timestamp,
        turn: Option<&TurnId>,
        body: EventBody,
        whole: Option<Rc<str>>,
    ) {
        if self.merge(turn, &body) {
            return;
        }
        let body = long::framed(body);
        self.last += 1;
        let event = OutboxEvent { number: self.last, at, turn: turn.cloned(), body };
        let size = size(&event.body) + whole.as_ref().map_or(0, |whole| whole.len());
        self.bytes += size;
        self.events.push_back(Entry { event, whole, size });
    }

    fn merge(&mut self, turn: Option<&TurnId>, body: &EventBody) -> bool {
        if self.shown >= self.events.len() {
            return false;
        }
        let Some(Entry { event: last, size: last_size, .. }) = self.events.back_mut() else {
            return false;
        };
        if last.turn.as_ref() != turn {
            return false;
        }
        let (into, piece) = match (&mut last.body, body) {
            (EventBody::TextDelta { text }, EventBody::TextDelta { text: piece })
            | (EventBody::ThoughtDelta { text }, EventBody::ThoughtDelta { text: piece }) => {
                (text, piece)
            }
            _ => return false,
        };
        if into.len() + piece.len() > MAX_PIECE_BYTES {
            return false;
        }
        into.push_str(piece);
        *last_size += piece.len();
        self.bytes += piece.len();
        true
    }

    fn next(&mut self) -> Option<OutboxEvent> {
        let event = self.events.get(self.sent)?.event.clone();
        self.sent += 1;
        self.shown = self.shown.max(self.sent);
        Some(event)
    }

    fn stored(&mut self, upto: u64) {
        while self.shown > 0 && self.events.front().is_some_and(|entry| entry.event.number <= upto)
        {
            if let Some(entry) = self.events.pop_front() {
                self.bytes -= entry.size;
            }
            self.sent = self.sent.saturating_sub(1);
            self.shown -= 1;
        }
    }
}

// Close enough for a limit: the text an event carries and something for the rest.
fn size(body: &EventBody) -> usize {
    const REST: usize = 256;
    REST + match body {
        EventBody::TextDelta { text } | EventBody::ThoughtDelta { text } => text.len(),
        EventBody::ToolStarted { input, .. } => {
            serde_json::to_string(input).map_or(0, |json| json.len())
        }
        EventBody::ToolEnded { output, .. } => output.len(),
        EventBody::AgentRaw { line } => line.len(),
        EventBody::BootPhase { tail, .. } => tail.as_ref().map_or(0, String::len),
        EventBody::AgentExited { tail, .. } => tail.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Text(String),
        Other,
        /// A tool says so many bytes.
        Output(usize),
        Send,
        /// The owner stores what it has received and says so.
        Store,
        /// The connection drops, with or without the last `EventsStored` having arrived.
        Reconnect,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            "[a-z]{1,4}".prop_map(Step::Text),
            Just(Step::Other),
            (0usize..200_000).prop_map(Step::Output),
            Just(Step::Send),
            Just(Step::Send),
            Just(Step::Store),
            Just(Step::Reconnect),
        ]
    }

    #[derive(Default)]
    struct Owner {
        received: Vec<OutboxEvent>,
        /// The length of the whole of each tool's output, in order.
        outputs: Vec<usize>,
    }

    impl Owner {
        // What a server does: a number it has already is dropped.
        fn receive(&mut self, outbox: &Outbox, event: OutboxEvent) {
            let known = self.received.len() as u64;
            assert!(event.number <= known + 1, "a gap before {}", event.number);
            if event.number == known + 1 {
                if let EventBody::ToolEnded { output, blob, .. } = &event.body {
                    let whole = blob.as_ref().map(|blob| outbox.blob(&blob.id).unwrap());
                    assert_eq!(
                        blob.as_ref().map(|blob| blob.bytes),
                        whole.as_ref().map(|whole| whole.len() as u64)
                    );
                    self.outputs.push(whole.map_or(output.len(), |whole| whole.len()));
                }
                self.received.push(event);
            } else {
                let index = usize::try_from(event.number - 1).unwrap();
                assert_eq!(
                    self.received[index].body, event.body,
                    "an event changed after it was shown"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn the_owner_gets_every_event_once_and_in_order(steps in proptest::collection::vec(step(), 0..80)) {
            let outbox = Outbox::new();
            let mut owner = Owner::default();
            let (mut said, mut outputs) = (String::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Text(text) => {
                        said.push_str(&text);
                        outbox.push(None, EventBody::TextDelta { text });
                    }
                    Step::Other => {
                        said.push('|');
                        outbox.push(None, EventBody::Compacted {});
                    }
                    Step::Output(bytes) => {
                        said.push('#');
                        outputs.push(bytes);
                        outbox.push(None, output(bytes));
                    }
                    Step::Send => {
                        if let Some(event) = outbox.next() {
                            owner.receive(&outbox, event);
                        }
                    }
                    Step::Store => outbox.stored(owner.received.len() as u64),
                    Step::Reconnect => outbox.reconnect(owner.received.len() as u64),
                }
            }
            outbox.reconnect(owner.received.len() as u64);
            while let Some(event) = outbox.next() {
                owner.receive(&outbox, event);
            }
            let heard: String = owner.received.iter().map(|event| match &event.body {
                EventBody::TextDelta { text } => text.clone(),
                EventBody::ToolEnded { .. } => "#".to_owned(),
                _ => "|".to_owned(),
            }).collect();
            prop_assert_eq!(heard, said);
            prop_assert_eq!(&owner.outputs, &outputs);
            prop_assert_eq!(outbox.last(), owner.received.len() as u64);
            outbox.stored(outbox.last());
            prop_assert_eq!(outbox.queue.borrow().bytes, 0);
        }
    }

    fn output(bytes: usize) -> EventBody {
        EventBody::ToolEnded { call: "c".into(), ok: true, output: "x".repeat(bytes), blob: None }
    }

    fn has_room(outbox: &Outbox) -> bool {
        use std::{future::Future, pin::pin, task};
        let mut context = task::Context::from_waker(task::Waker::noop());
        pin!(outbox.room()).poll(&mut context).is_ready()
    }

    #[test]
    fn who_reads_the_agent_waits_while_it_is_full_and_goes_on_when_something_is_stored() {
        let outbox = Outbox::new();
        let mut pushed = 0;
        while has_room(&outbox) {
            outbox.push(None, output(30_000));
            pushed += 1;
            assert!(pushed <= MAX_BYTES / 30_000 + 1, "it holds more than it may");
        }
        outbox.next();
        assert!(!has_room(&outbox), "what is sent is not stored yet");
        outbox.stored(1);
        assert!(has_room(&outbox));
    }

    #[test]
    fn a_blob_takes_room_until_its_event_is_stored() {
        let outbox = Outbox::new();
        outbox.push(None, output(MAX_BYTES));
        assert!(!has_room(&outbox));
        let event = outbox.next().unwrap();
        let id = event.body.blob().unwrap().id.clone();
        assert_eq!(outbox.blob(&id).unwrap().len(), MAX_BYTES);
        outbox.reconnect(0);
        assert_eq!(outbox.next(), Some(event), "the same blob is named again");
        outbox.stored(1);
        assert!(has_room(&outbox) && outbox.blob(&id).is_none());
    }

    #[test]
    fn an_event_that_would_be_no_frame_is_told_as_a_warning() {
        let outbox = Outbox::new();
        let body = EventBody::PromptQueued {
            prompt: harvest_proto::PromptId::random(),
            text: "x".repeat(2 * 1024 * 1024),
            author: String::new(),
        };
        outbox.push(None, body);
        let event = outbox.next().unwrap();
        assert!(
            matches!(&event.body, EventBody::Warning { message } if message.contains("2097")),
            "{event:?}"
        );
    }

    #[test]
    fn a_stored_number_never_given_out_drops_nothing() {
        let outbox = Outbox::new();
        outbox.push(None, EventBody::Compacted {});
        outbox.reconnect(99);
        assert_eq!(outbox.next().unwrap().number, 1);
    }
}
