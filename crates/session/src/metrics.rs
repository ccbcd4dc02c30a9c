//! Counters and histograms for monitoring, updated from stored events. Holds no user content.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use harvest_proto::{Event, EventBody, PromptId, Timestamp, event::TurnOutcome};

/// Bucket bounds in seconds, from a millisecond to half an hour.
const BUCKETS: &[f64] =
    &[0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 1800.0];

// Bounds memory: prompts beyond it are not timed.
const MAX_WAITING: usize = 10_000;

/// A histogram of durations.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    counts: Vec<u64>,
    sum: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS.len() + 1], sum: Duration::ZERO }
    }
}

impl Histogram {
    pub fn observe(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        let at = BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS.len());
        self.counts[at] += 1;
        self.sum = self.sum.saturating_add(took);
    }

    /// Cumulative counts: each upper bound in seconds with the number of observations up to it.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bounds = BUCKETS.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().scan(0, |total, count| {
            *total += count;
            Some(*total)
        }))
    }

    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    #[must_use]
    pub const fn sum(&self) -> Duration {
        self.sum
    }
}

/// Counts since the server started.
#[derive(Debug, Clone, Default)]
pub struct MetricCounts {
    /// Events stored.
    pub events: u64,
    /// Durations of ended turns, by outcome.
    pub turns: BTreeMap<&'static str, Histogram>,
    /// State changes, by state and reason.
    pub changes: BTreeMap<(&'static str, &'static str), u64>,
    /// Sandbox start times.
    pub starts: Histogram,
    /// Queue times of prompts.
    pub waits: Histogram,
    /// Snapshot times.
    pub snapshots: Histogram,
    waiting: HashMap<PromptId, Timestamp>,
}

/// Shared by all drivers.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Mutex<MetricCounts>);

impl Metrics {
    pub(crate) fn record(&self, event: &Event) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count(event);
    }

    pub(crate) fn counts(&self) -> MetricCounts {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        MetricCounts { waiting: HashMap::new(), ..counts.clone() }
    }
}

impl MetricCounts {
    fn count(&mut self, event: &Event) {
        self.events += 1;
        match &event.body {
            EventBody::StateChanged { state, reason, .. } => {
                *self.changes.entry((state.as_str(), reason.as_str())).or_default() += 1;
            }
            EventBody::PromptQueued { prompt, .. } if self.waiting.len() < MAX_WAITING => {
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
                    .entry(outcome_label(*outcome))
                    .or_default()
                    .observe(Duration::from_millis(*millis));
            }
            _ => {}
        }
    }
}

const fn outcome_label(outcome: TurnOutcome) -> &'static str {
    match outcome {
        TurnOutcome::Completed => "completed",
        TurnOutcome::Failed => "failed",
        TurnOutcome::Stopped => "stopped",
        TurnOutcome::Interrupted => "interrupted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{StateReason, api::SessionState};

    fn event(millis: i64, body: EventBody) -> Event {
        Event { seq: 1, at: Timestamp::from_millis(millis), turn: None, body }
    }

    #[test]
    fn histogram_buckets_are_cumulative() {
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
    fn queue_time_ends_with_turn_start() {
        let (metrics, prompt) = (Metrics::default(), PromptId::random());
        let queued = EventBody::PromptQueued {
            prompt: prompt.clone(),
            text: "x".into(),
            author: "Ada".into(),
            attachments: Vec::new(),
        };
        let lost = EventBody::StateChanged {
            state: SessionState::Failed,
            reason: StateReason::SandboxLost,
            detail: None,
        };
        let events = [
            event(1_000, queued),
            event(1_500, EventBody::TurnStarted { prompt: prompt.clone(), number: 1 }),
            event(1_500, EventBody::TurnStarted { prompt, number: 1 }),
            event(2_000, lost),
        ];
        events.iter().for_each(|event| metrics.record(event));
        let counts = metrics.counts();
        assert_eq!(
            (counts.events, counts.waits.count(), counts.waits.sum()),
            (4, 1, Duration::from_millis(500))
        );
        assert_eq!(counts.changes.into_iter().next(), Some((("failed", "sandbox_lost"), 1)));
    }
}
