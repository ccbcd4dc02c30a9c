//! Counts what happens in sessions, for whoever watches the server. Learns everything from events once
//! they are stored; holds no text of anybody's.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use harvest_proto::{Event, EventBody, PromptId, Timestamp, api::SessionState, event::TurnOutcome};

/// From a millisecond to half an hour.
const SECONDS: &[f64] =
    &[0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 1800.0];

// Prompts that were queued and whose turn nobody saw begin: a bound, not a promise.
const MOST_WAITING: usize = 10_000;

/// How often something took how long.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    counts: Vec<u64>,
    sum: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; SECONDS.len() + 1], sum: Duration::ZERO }
    }
}

impl Histogram {
    /// Counts one.
    pub fn observe(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        let at = SECONDS.iter().position(|bound| seconds <= *bound).unwrap_or(SECONDS.len());
        self.counts[at] += 1;
        self.sum = self.sum.saturating_add(took);
    }

    /// Each bound in seconds with how many took at most so long.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bounds = SECONDS.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().scan(0, |total, count| {
            *total += count;
            Some(*total)
        }))
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// What they took together.
    #[must_use]
    pub const fn sum(&self) -> Duration {
        self.sum
    }
}

/// What was counted since the server started.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Events stored.
    pub events: u64,
    /// Turns that ended, by outcome, with what they took.
    pub turns: BTreeMap<&'static str, Histogram>,
    /// Changes of state, by state and reason.
    pub changes: BTreeMap<(&'static str, String), u64>,
    /// Sandboxes started, with what that took.
    pub starts: Histogram,
    /// How long prompts waited for their turn.
    pub waits: Histogram,
    /// Snapshots taken, with what that took.
    pub snapshots: Histogram,
    waiting: HashMap<PromptId, Timestamp>,
}

/// Counts, shared by all drivers.
#[derive(Debug, Default)]
pub(crate) struct Meters(Mutex<Counts>);

impl Meters {
    /// Takes note of an event that is stored.
    pub(crate) fn stored(&self, event: &Event) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count(event);
    }

    /// What was counted so far.
    pub(crate) fn counts(&self) -> Counts {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Counts { waiting: HashMap::new(), ..counts.clone() }
    }
}

impl Counts {
    fn count(&mut self, event: &Event) {
        self.events += 1;
        match &event.body {
            EventBody::StateChanged { state, reason, .. } => {
                *self.changes.entry((SessionState::as_str(*state), word(reason))).or_default() += 1;
            }
            EventBody::PromptQueued { prompt, .. } if self.waiting.len() < MOST_WAITING => {
                self.waiting.insert(prompt.clone(), event.at);
            }
            EventBody::PromptCancelled { prompt } => {
                self.waiting.remove(prompt);
            }
            EventBody::TurnStarted { prompt, .. } => {
                if let Some(queued) = self.waiting.remove(prompt) {
                    self.waits.observe(event.at.since(queued));
                }
            }
            EventBody::SandboxStarted { millis, .. } => {
                self.starts.observe(Duration::from_millis(*millis))
            }
            EventBody::SnapshotTaken { millis, .. } => {
                self.snapshots.observe(Duration::from_millis(*millis));
            }
            EventBody::TurnEnded { outcome, millis, .. } => {
                self.turns
                    .entry(named(*outcome))
                    .or_default()
                    .observe(Duration::from_millis(*millis));
            }
            _ => {}
        }
    }
}

const fn named(outcome: TurnOutcome) -> &'static str {
    match outcome {
        TurnOutcome::Completed => "completed",
        TurnOutcome::Failed => "failed",
        TurnOutcome::Stopped => "stopped",
        TurnOutcome::Interrupted => "interrupted",
    }
}

/// A reason is a word of ours; should one ever be something else, it is not shown.
fn word(reason: &str) -> String {
    let ours = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    match (1..=40).contains(&reason.len()) && reason.bytes().all(ours) {
        true => reason.to_owned(),
        false => "other".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(millis: i64, body: EventBody) -> Event {
        Event { seq: 1, at: Timestamp::from_millis(millis), turn: None, body }
    }

    #[test]
    fn a_histogram_counts_upwards() {
        let mut histogram = Histogram::default();
        for millis in [0, 1, 2, 3_600_000] {
            histogram.observe(Duration::from_millis(millis));
        }
        let buckets: Vec<(f64, u64)> = histogram.buckets().collect();
        assert_eq!((buckets[0], buckets[1]), ((0.001, 2), (0.005, 3)));
        assert_eq!(
            (buckets[buckets.len() - 2].1, buckets[buckets.len() - 1]),
            (3, (f64::INFINITY, 4))
        );
        assert_eq!((histogram.count(), histogram.sum()), (4, Duration::from_millis(3_600_003)));
    }

    #[test]
    fn a_prompts_wait_ends_with_its_turns_beginning_and_a_text_is_no_reason() {
        let (meters, prompt) = (Meters::default(), PromptId::random());
        let queued = EventBody::PromptQueued {
            prompt: prompt.clone(),
            text: "x".into(),
            author: "Ada".into(),
        };
        let change = |reason: &str| EventBody::StateChanged {
            state: SessionState::Failed,
            reason: reason.into(),
            detail: None,
        };
        let events = [
            event(1_000, queued),
            event(1_500, EventBody::TurnStarted { prompt: prompt.clone(), number: 1 }),
            event(1_500, EventBody::TurnStarted { prompt, number: 1 }),
            event(2_000, change("sandbox_lost")),
            event(2_000, change("rm -rf /")),
        ];
        events.iter().for_each(|event| meters.stored(event));
        let counts = meters.counts();
        assert_eq!(
            (counts.events, counts.waits.count(), counts.waits.sum()),
            (5, 1, Duration::from_millis(500))
        );
        let reasons: Vec<&str> = counts.changes.keys().map(|key| key.1.as_str()).collect();
        assert_eq!(reasons, ["other", "sandbox_lost"]);
    }
}
