//! Holds events until the owner has stored them. Numbers them 1, 2, 3… for the life of the sandbox,
//! sends what follows the owner's last stored number after every reconnect, never drops one.
//!
//! It is bounded by its sources: whoever reads the agent waits for [`Outbox::room`] first.

use std::{cell::RefCell, collections::VecDeque, rc::Rc, time::SystemTime};

use harvest_proto::{EventBody, Timestamp, TurnId, bridge::OutboxEvent};
use tokio::sync::Notify;

// What a sandbox may pile up while its server is away before its agent has to wait.
const MAX_BYTES: usize = 8 * 1024 * 1024;

// Neighbouring pieces of text become one event up to this.
const MAX_MERGED_BYTES: usize = 16 * 1024;

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
        self.queue.borrow_mut().push(Timestamp::from(SystemTime::now()), turn, body);
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

    /// The highest number given out.
    pub(crate) fn last(&self) -> u64 {
        self.queue.borrow().last
    }
}

#[derive(Debug, Default)]
struct Queue {
    /// Everything not stored yet, in order.
    events: VecDeque<(OutboxEvent, usize)>,
    /// How many of `events` this connection has been sent.
    sent: usize,
    /// How many at the front any connection has been sent: their numbers are known outside, so
    /// they may not change any more.
    shown: usize,
    last: u64,
    bytes: usize,
}

impl Queue {
    fn push(&mut self, at: Timestamp, turn: Option<&TurnId>, body: EventBody) {
        if self.merge(turn, &body) {
            return;
        }
        self.last += 1;
        let event = OutboxEvent { number: self.last, at, turn: turn.cloned(), body };
        let size = size(&event.body);
        self.bytes += size;
        self.events.push_back((event, size));
    }

    fn merge(&mut self, turn: Option<&TurnId>, body: &EventBody) -> bool {
        if self.shown >= self.events.len() {
            return false;
        }
        let Some((last, last_size)) = self.events.back_mut() else { return false };
        if last.turn.as_ref() != turn {
            return false;
        }
        let (into, piece) = match (&mut last.body, body) {
            (EventBody::TextDelta { text }, EventBody::TextDelta { text: piece })
            | (EventBody::ThoughtDelta { text }, EventBody::ThoughtDelta { text: piece }) => (text, piece),
            _ => return false,
        };
        if into.len() + piece.len() > MAX_MERGED_BYTES {
            return false;
        }
        into.push_str(piece);
        *last_size += piece.len();
        self.bytes += piece.len();
        true
    }

    fn next(&mut self) -> Option<OutboxEvent> {
        let (event, _) = self.events.get(self.sent)?;
        self.sent += 1;
        self.shown = self.shown.max(self.sent);
        Some(event.clone())
    }

    fn stored(&mut self, upto: u64) {
        while self.shown > 0 && self.events.front().is_some_and(|(event, _)| event.number <= upto) {
            if let Some((_, size)) = self.events.pop_front() {
                self.bytes -= size;
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
        EventBody::ToolStarted { input, .. } => serde_json::to_string(input).map_or(0, |json| json.len()),
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
            Just(Step::Send),
            Just(Step::Send),
            Just(Step::Store),
            Just(Step::Reconnect),
        ]
    }

    #[derive(Default)]
    struct Owner {
        received: Vec<OutboxEvent>,
    }

    impl Owner {
        // What a server does: a number it has already is dropped.
        fn receive(&mut self, event: OutboxEvent) {
            let known = self.received.len() as u64;
            assert!(event.number <= known + 1, "a gap before {}", event.number);
            if event.number == known + 1 {
                self.received.push(event);
            } else {
                let index = usize::try_from(event.number - 1).unwrap();
                assert_eq!(self.received[index].body, event.body, "an event changed after it was shown");
            }
        }
    }

    proptest! {
        #[test]
        fn the_owner_gets_every_event_once_and_in_order(steps in proptest::collection::vec(step(), 0..80)) {
            let outbox = Outbox::new();
            let mut owner = Owner::default();
            let mut said = String::new();
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
                    Step::Send => {
                        if let Some(event) = outbox.next() {
                            owner.receive(event);
                        }
                    }
                    Step::Store => outbox.stored(owner.received.len() as u64),
                    Step::Reconnect => outbox.reconnect(owner.received.len() as u64),
                }
            }
            outbox.reconnect(owner.received.len() as u64);
            while let Some(event) = outbox.next() {
                owner.receive(event);
            }
            let heard: String = owner.received.iter().map(|event| match &event.body {
                EventBody::TextDelta { text } => text.clone(),
                _ => "|".to_owned(),
            }).collect();
            prop_assert_eq!(heard, said);
            prop_assert_eq!(outbox.last(), owner.received.len() as u64);
            outbox.stored(outbox.last());
            prop_assert_eq!(outbox.queue.borrow().bytes, 0);
        }
    }

    #[test]
    fn a_stored_number_never_given_out_drops_nothing() {
        let outbox = Outbox::new();
        outbox.push(None, EventBody::Compacted {});
        outbox.reconnect(99);
        assert_eq!(outbox.next().unwrap().number, 1);
    }
}
