//! The budget of a session's history: what is stored of an agent's output when a turn or a session
//! has stored too much. Pure, except for [`Pace`], which measures time.
//!
//! Output beyond a limit is left out, with one warning per turn. Events that the session depends
//! on (the start and end of a turn, questions) are stored in a short form.

use std::time::Duration;

use harvest_proto::{EventBody, TurnId};
use tokio::time::Instant;

// What a row costs besides its text.
const ROW_BYTES: u64 = 200;

// For questions and answers of a turn that has reached its limit.
const SPARE_BYTES: u64 = 1 << 20;

// Texts of events that are stored beyond the limit.
const SHORT_BYTES: usize = 1024;

// An agent writes kilobytes per second. The burst is a large tool output in many events.
const BYTES_PER_SECOND: u64 = 4 << 20;
const BURST_BYTES: u64 = 16 << 20;

/// The most bytes of events that are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryLimits {
    /// Of one turn.
    pub per_turn: u64,
    /// Of one session.
    pub per_session: u64,
}

impl Default for HistoryLimits {
    fn default() -> Self {
        // A long turn of a real agent takes a few megabytes.
        Self { per_turn: 64 << 20, per_session: 512 << 20 }
    }
}

impl HistoryLimits {
    /// What is stored when the session, or a turn, reaches its limit.
    pub(crate) fn warnings(self) -> [EventBody; 2] {
        [
            format!(
                "the history of this session has reached {} MiB: further output is not stored; \
                 fork the session to go on, or raise retention.history_per_session",
                self.per_session >> 20
            ),
            format!(
                "the history of this turn has reached {} MiB: its further output is not stored; \
                 the limit is retention.history_per_turn",
                self.per_turn >> 20
            ),
        ]
        .map(|message| EventBody::Warning { message })
    }
}

/// The bytes that an event takes in the history.
pub(crate) fn size(body: &EventBody) -> u64 {
    struct Count(u64);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(ROW_BYTES);
    let _infallible = serde_json::to_writer(&mut count, body);
    count.0
}

/// The bytes that stored events take in the history, by the bytes of their texts.
pub(crate) const fn stored_size(bytes: u64, events: u64) -> u64 {
    bytes.saturating_add(events.saturating_mul(ROW_BYTES))
}

/// What a session and its current turn have stored.
#[derive(Debug, Clone)]
pub(crate) struct HistoryBudget {
    limits: HistoryLimits,
    session: u64,
    turn: Option<TurnId>,
    turn_bytes: u64,
    spare: u64,
    /// The current turn has reached a limit, and its warning is stored.
    reached: bool,
}

impl HistoryBudget {
    /// The budget of a session that has stored this many bytes.
    pub(crate) fn new(limits: HistoryLimits, stored: u64) -> Self {
        let (turn, turn_bytes) = (None, 0);
        Self { limits, session: stored, turn, turn_bytes, spare: SPARE_BYTES, reached: false }
    }

    /// The session goes on with a turn that has stored this many bytes, and one of the
    /// [`HistoryLimits::warnings`] if `reached`.
    pub(crate) fn resume_turn(&mut self, turn: TurnId, stored: u64, reached: bool) {
        (self.turn, self.turn_bytes, self.reached) = (Some(turn), stored, reached);
    }

    /// What is stored of an event; `None` is nothing.
    pub(crate) fn admit(&mut self, turn: Option<&TurnId>, body: EventBody) -> Option<EventBody> {
        if turn.is_some() && self.turn.as_ref() != turn {
            let new = Self::new(self.limits, self.session);
            *self = Self { turn: turn.cloned(), ..new };
        }
        let admitted = match self.exceeded(size(&body)) {
            None if !self.reached => Some(body),
            _ if is_bounded(&body) => Some(shortened(body)),
            _ if is_question(&body) => {
                let short = shortened(body);
                let left = self.spare.checked_sub(size(&short));
                self.spare = left.unwrap_or(self.spare);
                left.map(|_| short)
            }
            Some(warning) if !self.reached => {
                self.reached = true;
                Some(warning)
            }
            _ => None,
        };
        let bytes = admitted.as_ref().map_or(0, size);
        self.session = self.session.saturating_add(bytes);
        self.turn_bytes = self.turn_bytes.saturating_add(bytes);
        admitted
    }

    /// The warning for the limit that these bytes would exceed.
    fn exceeded(&self, bytes: u64) -> Option<EventBody> {
        let over_session = self.session.saturating_add(bytes) > self.limits.per_session;
        let over_turn = self.turn_bytes.saturating_add(bytes) > self.limits.per_turn;
        let [session, turn] = (over_session || over_turn).then(|| self.limits.warnings())?;
        Some(if over_session { session } else { turn })
    }
}

/// Events of which a turn has only a few.
fn is_bounded(body: &EventBody) -> bool {
    matches!(
        body,
        EventBody::TurnStarted { .. }
            | EventBody::TurnEnded { .. }
            | EventBody::BootPhase { .. }
            | EventBody::Synced { .. }
            | EventBody::SyncEnded { .. }
            | EventBody::WorkSaved(_)
            | EventBody::AgentExited { .. }
    )
}

fn is_question(body: &EventBody) -> bool {
    matches!(body, EventBody::RequestOpened { .. } | EventBody::RequestClosed { .. })
}

fn shortened(mut body: EventBody) -> EventBody {
    let cut = |text: &mut String| text.truncate(text.floor_char_boundary(SHORT_BYTES));
    match &mut body {
        EventBody::TurnEnded { error, .. } => error.iter_mut().for_each(cut),
        EventBody::BootPhase { tail, .. } => tail.iter_mut().for_each(cut),
        EventBody::AgentExited { tail, .. } | EventBody::InstallStep { tail, .. } => cut(tail),
        EventBody::RequestOpened { question, options, .. } => {
            cut(question);
            options.iter_mut().for_each(cut);
        }
        EventBody::RequestClosed { answer, .. } => answer.iter_mut().for_each(cut),
        _ => {}
    }
    body
}

/// Backpressure: the pace at which a sandbox's events are taken. While they wait, the supervisor's
/// outbox is full and the agent blocks.
#[derive(Debug)]
pub(crate) struct Pace {
    free_bytes: u64,
    at: Instant,
}

impl Pace {
    pub(crate) fn new(now: Instant) -> Self {
        Self { free_bytes: BURST_BYTES, at: now }
    }

    /// Takes these bytes; returns how long to wait first.
    pub(crate) fn take(&mut self, bytes: u64, now: Instant) -> Duration {
        let millis = u64::try_from(now.duration_since(self.at).as_millis()).unwrap_or(u64::MAX);
        let earned = millis.saturating_mul(BYTES_PER_SECOND / 1000);
        self.free_bytes = self.free_bytes.saturating_add(earned).min(BURST_BYTES);
        self.at = now.max(self.at);
        let missing = bytes.saturating_sub(self.free_bytes);
        self.free_bytes = self.free_bytes.saturating_sub(bytes);
        let wait = Duration::from_micros(missing.saturating_mul(1_000_000) / BYTES_PER_SECOND);
        // What arrives during the wait is spent on these bytes.
        self.at += wait;
        wait
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::{PromptId, event::TurnOutcome};
    use proptest::prelude::*;

    use super::*;

    fn text(bytes: usize) -> EventBody {
        EventBody::TextDelta { text: "x".repeat(bytes) }
    }

    fn question() -> EventBody {
        let text = "x".repeat(10_000);
        EventBody::RequestOpened { request: "r".into(), question: text, options: Vec::new() }
    }

    fn ended() -> EventBody {
        let (prompt, outcome) = (PromptId::random(), TurnOutcome::Completed);
        EventBody::TurnEnded {
            prompt,
            outcome,
            reason: None,
            error: Some("x".repeat(10_000)),
            millis: 1,
        }
    }

    #[test]
    fn turn_beyond_its_limit_stores_one_warning() {
        let limits = HistoryLimits { per_turn: 10_000, per_session: 1 << 30 };
        let mut budget = HistoryBudget::new(limits, 0);
        let (one, two) = (TurnId::random(), TurnId::random());
        let stored: Vec<_> =
            (0..100).filter_map(|_| budget.admit(Some(&one), text(1000))).collect();
        assert!(stored[..stored.len() - 1].iter().all(|body| *body == text(1000)));
        let Some(EventBody::Warning { message }) = stored.last() else { panic!("{stored:?}") };
        assert!(message.contains("retention.history_per_turn"), "{message}");
        assert_eq!(budget.admit(Some(&one), text(1)), None, "also an event that would fit");
        let Some(EventBody::TurnEnded { error: Some(error), .. }) =
            budget.admit(Some(&one), ended())
        else {
            panic!("the end of a turn is always stored")
        };
        assert_eq!(error.len(), SHORT_BYTES);
        assert_eq!(budget.admit(Some(&two), text(1000)), Some(text(1000)), "the next turn is free");
    }

    #[test]
    fn limit_of_a_turn_holds_across_restarts() {
        let limits = HistoryLimits { per_turn: 10_000, per_session: 1 << 30 };
        let (turn, mut stored, mut warnings) = (TurnId::random(), 0, 0);
        for _ in 0..20 {
            let mut budget = HistoryBudget::new(limits, stored);
            budget.resume_turn(turn.clone(), stored, warnings > 0);
            match budget.admit(Some(&turn), text(1000)) {
                Some(body) if body == text(1000) => stored += size(&body),
                Some(_) => warnings += 1,
                None => {}
            }
        }
        assert!(stored > 8_000 && stored <= limits.per_turn, "{stored}");
        assert_eq!(warnings, 1);
    }

    #[test]
    fn session_limit_holds_across_turns() {
        let limits = HistoryLimits { per_turn: 10_000, per_session: 20_000 };
        let mut budget = HistoryBudget::new(limits, 19_900);
        for _ in 0..3 {
            let turn = TurnId::random();
            let Some(EventBody::Warning { message }) = budget.admit(Some(&turn), text(1)) else {
                panic!("each turn says it once")
            };
            assert!(message.contains("retention.history_per_session"), "{message}");
            assert_eq!(budget.admit(Some(&turn), text(1)), None);
        }
    }

    proptest! {
        // Each case serializes megabytes.
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn flood_of_any_kind_is_bounded(kinds in prop::collection::vec(0..3, 1200)) {
            let limits = HistoryLimits { per_turn: 100_000, per_session: 1 << 30 };
            let (mut budget, turn) = (HistoryBudget::new(limits, 0), TurnId::random());
            let mut stored = 0;
            for kind in kinds {
                let body = match kind { 0 => text(5000), 1 => question(), _ => text(1) };
                stored += budget.admit(Some(&turn), body).as_ref().map_or(0, size);
            }
            prop_assert!(stored <= limits.per_turn + SPARE_BYTES + 1000, "{stored}");
        }
    }

    #[test]
    fn steady_flood_is_slowed_to_the_pace() {
        let start = Instant::now();
        let (mut pace, mut now, mut bytes) = (Pace::new(start), start, 0);
        assert_eq!(pace.take(BURST_BYTES, now), Duration::ZERO, "a burst does not wait");
        while bytes < 40 << 20 {
            now += pace.take(1 << 16, now);
            bytes += 1 << 16;
        }
        assert_eq!(now.duration_since(start).as_secs(), bytes / BYTES_PER_SECOND);
        let idle = now + Duration::from_secs(60);
        assert_eq!(pace.take(BURST_BYTES, idle), Duration::ZERO, "it recovers");
    }
}
