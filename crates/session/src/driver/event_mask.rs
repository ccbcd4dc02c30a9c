//! Masks the values of secrets in the events of a sandbox, before they are stored. No sandbox has
//! them; a user may have pasted one, or a service returned it. A value in several consecutive parts
//! of a text is found, too: a part whose end may begin a value waits for the next one. The mask is
//! as long as the value, so sizes stay valid. Pure.

use std::sync::Arc;

use harvest_proto::{EventBody, bridge::OutboxEvent};

use crate::{bridge::OwnerMessage, secret_mask::SecretMask};

/// Masks the events of a connection in their order.
#[derive(Default)]
pub(super) struct EventMask {
    values: Arc<SecretMask>,
    /// Consecutive parts of one text, of which the last may end in the start of a value.
    held: Vec<OutboxEvent>,
}

impl EventMask {
    pub(super) fn set_values(&mut self, values: Arc<SecretMask>) {
        self.values = values;
    }

    /// Whether an event waits for the next one.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// The messages that can be stored after this one.
    pub(super) fn push(&mut self, message: OwnerMessage) -> Vec<OwnerMessage> {
        let mut event = match message {
            OwnerMessage::Event(event) if !self.values.is_empty() => event,
            // A heartbeat does not depend on the events around it.
            other => {
                let mut ready = match other {
                    OwnerMessage::Event(_) => self.release(),
                    OwnerMessage::Heartbeat { .. } => Vec::new(),
                };
                ready.push(other);
                return ready;
            }
        };
        let Some(text) = part(&mut event.body) else {
            let mut ready = self.release();
            ready.push(OwnerMessage::Event(self.mask(event)));
            return ready;
        };
        *text = self.values.mask(std::mem::take(text));
        let continues = self.held.last().is_some_and(|last| continues(last, &event));
        let mut ready = if continues { Vec::new() } else { self.release() };
        self.held.push(*event);
        self.mask_held();
        ready.extend(self.release_complete());
        ready
    }

    /// The events that waited, when nothing follows them.
    pub(super) fn release(&mut self) -> Vec<OwnerMessage> {
        std::mem::take(&mut self.held).into_iter().map(ready).collect()
    }

    /// Masks every value in an event; as JSON, because each text of it may contain one.
    fn mask(&self, mut event: Box<OutboxEvent>) -> Box<OutboxEvent> {
        let Ok(json) = serde_json::to_string(&event.body) else { return event };
        let masked = self.values.mask(json.clone());
        if masked != json {
            // A value that is a word of the format stays: it is no secret.
            event.body = serde_json::from_str(&masked).unwrap_or(event.body);
        }
        event
    }

    fn held_text(&mut self) -> String {
        self.held.iter_mut().filter_map(|event| part(&mut event.body).cloned()).collect()
    }

    /// Masks values that several parts make together.
    fn mask_held(&mut self) {
        let whole = self.held_text();
        let masked = self.values.mask(whole.clone());
        if masked == whole {
            return;
        }
        let mut rest = masked.as_str();
        for event in &mut self.held {
            if let Some(text) = part(&mut event.body) {
                // The mask is as long as what it replaces, and ASCII: every part begins where it
                // began.
                let (own, after) = rest.split_at(text.len());
                (*text, rest) = (own.to_owned(), after);
            }
        }
    }

    /// Removes the parts that end before the possible start of a value.
    fn release_complete(&mut self) -> Vec<OwnerMessage> {
        let whole = self.held_text();
        let complete = whole.len() - self.values.possible_start(&whole);
        let (mut at, mut count) = (0, 0);
        for event in &mut self.held {
            at += part(&mut event.body).map_or(0, |text| text.len());
            if at > complete {
                break;
            }
            count += 1;
        }
        self.held.drain(..count).map(ready).collect()
    }
}

fn ready(event: OutboxEvent) -> OwnerMessage {
    OwnerMessage::Event(Box::new(event))
}

/// The text of an event that is a part of a longer one.
fn part(body: &mut EventBody) -> Option<&mut String> {
    match body {
        EventBody::TextDelta { text }
        | EventBody::ThoughtDelta { text }
        | EventBody::ToolOutput { text, .. } => Some(text),
        _ => None,
    }
}

/// Whether an event is the next part of the same text.
fn continues(last: &OutboxEvent, next: &OutboxEvent) -> bool {
    match (&last.body, &next.body) {
        (EventBody::TextDelta { .. }, EventBody::TextDelta { .. })
        | (EventBody::ThoughtDelta { .. }, EventBody::ThoughtDelta { .. }) => true,
        (EventBody::ToolOutput { call: one, .. }, EventBody::ToolOutput { call: other, .. }) => {
            one == other
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use harvest_gateway::ledger::NamedSecret;
    use harvest_proto::{Secret, Timestamp};
    use proptest::prelude::*;

    use super::*;

    const VALUE: &str = "key-k\u{e9}y-planted";

    fn event(number: u64, body: EventBody) -> OwnerMessage {
        let at = Timestamp::from_millis(0);
        OwnerMessage::Event(Box::new(OutboxEvent { number, at, turn: None, body }))
    }

    fn mask() -> EventMask {
        let mut mask = EventMask::default();
        let secrets = [format!("{VALUE}\n"), "ab".to_owned()];
        let secrets =
            secrets.map(|value| NamedSecret { name: "KEY".to_owned(), value: Secret::new(value) });
        mask.set_values(Arc::new(SecretMask::new(secrets)));
        mask
    }

    fn bodies(messages: Vec<OwnerMessage>) -> Vec<EventBody> {
        let body = |message| match message {
            OwnerMessage::Event(event) => event.body,
            OwnerMessage::Heartbeat { .. } => panic!("a heartbeat"),
        };
        messages.into_iter().map(body).collect()
    }

    #[test]
    fn every_text_of_an_event_is_masked() {
        let ended = EventBody::ToolEnded {
            call: "1".into(),
            ok: true,
            output: format!("a \"{VALUE}\" ab"),
            blob: None,
        };
        let masked = bodies(mask().push(event(1, ended)));
        let [EventBody::ToolEnded { output, .. }] = masked.as_slice() else { panic!("{masked:?}") };
        assert_eq!(*output, format!("a \"{}\" ab", "*".repeat(VALUE.len())));
    }

    #[test]
    fn part_waits_only_while_a_value_may_follow() {
        let mut mask = mask();
        let text = |text: &str| EventBody::TextDelta { text: text.into() };
        assert_eq!(bodies(mask.push(event(1, text("plain")))), [text("plain")]);
        assert!(mask.push(event(2, text("a k"))).is_empty() && mask.holds());
        let beat = mask.push(OwnerMessage::Heartbeat { detached: 0 });
        assert!(matches!(beat[..], [OwnerMessage::Heartbeat { .. }]));
        let thought = EventBody::ThoughtDelta { text: "ey-".into() };
        assert_eq!(bodies(mask.push(event(3, thought.clone()))), [text("a k"), thought]);
        assert!(!mask.holds());
    }

    proptest! {
        #[test]
        fn value_is_masked_wherever_parts_end(
            before in "[a-z-]{0,9}",
            after in "[a-z-]{0,9}",
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        ) {
            let whole = format!("{before}{VALUE}{after}");
            let borders: Vec<usize> = whole.char_indices().map(|(at, _)| at).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&borders)).collect();
            cuts.extend([0, whole.len()]);
            cuts.sort_unstable();
            let mut mask = mask();
            let mut seen = Vec::new();
            for (number, cut) in cuts.windows(2).enumerate() {
                let text = whole[cut[0]..cut[1]].to_owned();
                seen.extend(mask.push(event(number as u64, EventBody::TextDelta { text })));
            }
            seen.extend(mask.release());
            prop_assert_eq!(seen.len(), cuts.len() - 1);
            let texts = bodies(seen).into_iter().map(|mut body| part(&mut body).unwrap().clone());
            let expected = format!("{before}{}{after}", "*".repeat(VALUE.len()));
            prop_assert_eq!(texts.collect::<String>(), expected);
        }
    }
}
