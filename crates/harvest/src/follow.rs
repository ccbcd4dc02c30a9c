//! Reads API streams (JSON lines, server-sent events) and decides when a followed session is done.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, stream::BoxStream};
use harvest_proto::{
    Event, EventBody, PromptId, RepositoryName, TurnReason,
    api::{CheckOutcome, Evidence, Session, SessionState},
    event::TurnOutcome,
};
use serde::de::DeserializeOwned;

// Events are at most 64 KiB, exec lines 64 KiB in base64: a much longer line is not from Harvest.
const MAX_LINE_BYTES: usize = 4 * 1024 * 1024;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Update {
    /// The session's current state; sent first and again after every reconnect.
    Snapshot(Box<Session>),
    Event(Box<Event>),
}

/// A response body read line by line.
pub(crate) struct Lines {
    bytes: BoxStream<'static, Result<Vec<u8>>>,
    buffer: Vec<u8>,
}

impl Lines {
    pub(crate) fn new(response: reqwest::Response) -> Self {
        let bytes = response.bytes_stream().map(|piece| Ok(piece.map(Vec::from)?)).boxed();
        Self { bytes, buffer: Vec::new() }
    }

    /// The lines of an in-process response.
    pub(crate) fn of(chunks: BoxStream<'static, std::io::Result<Vec<u8>>>) -> Self {
        Self { bytes: chunks.map(|chunk| Ok(chunk?)).boxed(), buffer: Vec::new() }
    }

    /// The next line without its line end, or `None` at the end of the body.
    async fn line(&mut self) -> Result<Option<String>> {
        let mut searched = 0;
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.buffer[searched..]) {
                let rest = self.buffer.split_off(searched + end + 1);
                let line = std::mem::replace(&mut self.buffer, rest);
                let text = String::from_utf8(line).context("the response is not UTF-8")?;
                return Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()));
            }
            searched = self.buffer.len();
            if searched > MAX_LINE_BYTES {
                bail!("the server sent a line longer than {MAX_LINE_BYTES} bytes");
            }
            match self.bytes.next().await {
                Some(piece) => {
                    self.buffer.extend_from_slice(&piece.context("the response broke off")?)
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => bail!("the response broke off in the middle of a line"),
            }
        }
    }

    /// The next line as JSON; empty lines are heartbeats.
    pub(crate) async fn json<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        while let Some(line) = self.line().await? {
            if !line.is_empty() {
                return Ok(Some(
                    serde_json::from_str(&line).context("cannot parse a line of the response")?,
                ));
            }
        }
        Ok(None)
    }

    /// The lines of the next server-sent event, or `None` at the end of the stream.
    pub(crate) async fn frame(&mut self) -> Result<Option<Vec<String>>> {
        let mut lines = Vec::new();
        while let Some(line) = self.line().await? {
            if line.is_empty() {
                return Ok(Some(lines));
            }
            lines.push(line);
        }
        // The specification says to discard an unfinished event.
        Ok(None)
    }
}

/// Parses a server-sent event; `None` for a heartbeat.
pub(crate) fn parse_frame(lines: &[String]) -> Result<Option<Update>> {
    let field = |name: &str| {
        let values = lines.iter().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        values.map(|value| value.strip_prefix(' ').unwrap_or(value)).collect::<Vec<_>>()
    };
    let data = field("data").join("\n");
    if data.is_empty() {
        return Ok(None);
    }
    let update = match field("event")[..] {
        ["snapshot"] => {
            serde_json::from_str(&data).map(|session| Update::Snapshot(Box::new(session)))
        }
        _ => serde_json::from_str(&data).map(|event| Update::Event(Box::new(event))),
    };
    // A newer server may send event types that this version does not know: skip them.
    match update {
        Ok(update) => Ok(Some(update)),
        Err(error) if error.is_data() => {
            tracing::warn!(%error, "skipped an event of an unknown type");
            Ok(None)
        }
        Err(error) => Err(error).context("cannot parse an event"),
    }
}

/// An event of a page; `None` for a type that this version does not know.
pub(crate) fn known_event(value: serde_json::Value) -> Option<Event> {
    serde_json::from_value(value)
        .inspect_err(|error| tracing::warn!(%error, "skipped an event of an unknown type"))
        .ok()
}

/// The result of a followed session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The last turn completed and no check failed.
    Succeeded,
    /// The last turn, the session or a check failed.
    Failed,
    /// The agent asked a question.
    NeedsInput,
}

/// Decides when a followed session is done: it is idle or paused, its queue is empty and its pushed
/// commits are checked. Pure.
#[derive(Debug, Default)]
pub(crate) struct CompletionTracker {
    /// Prompts without a finished turn.
    pending: BTreeSet<PromptId>,
    question: Option<Question>,
    /// The prompt that answers the question; it starts no turn.
    answer: Option<PromptId>,
    turn_failed: bool,
    /// The error of the last turn, if a budget has ended it.
    over_budget: Option<String>,
    /// Repositories whose last checked commit failed.
    failed_checks: BTreeSet<RepositoryName>,
    /// Pushed commits that are not checked yet, by repository.
    unchecked: BTreeMap<RepositoryName, String>,
    state: Option<SessionState>,
}

/// A question of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    request: String,
    pub(crate) options: Vec<String>,
}

impl CompletionTracker {
    /// Ends the part of the history that only tells which prompts and questions are open.
    pub(crate) fn begin(&mut self) {
        let Self { pending, question, answer, .. } = std::mem::take(self);
        *self = Self { pending, question, answer, ..Self::default() };
    }

    /// The agent's open question.
    pub(crate) fn question(&self) -> Option<&Question> {
        self.question.as_ref()
    }

    /// The error of the last turn, if a budget has ended it.
    pub(crate) fn over_budget(&self) -> Option<&str> {
        self.over_budget.as_deref()
    }

    /// `Some` once there is nothing left to wait for.
    pub(crate) fn event(&mut self, body: &EventBody) -> Option<Verdict> {
        match body {
            EventBody::PromptQueued { prompt, .. } => {
                if self.question.is_some() && self.answer.is_none() {
                    self.answer = Some(prompt.clone());
                } else {
                    self.pending.insert(prompt.clone());
                }
            }
            EventBody::PromptCancelled { prompt } => drop(self.pending.remove(prompt)),
            EventBody::RequestOpened { request, options, .. } => {
                self.close_question(false);
                self.question =
                    Some(Question { request: request.clone(), options: options.clone() });
            }
            EventBody::RequestClosed { answer, .. } => self.close_question(answer.is_some()),
            EventBody::TurnEnded { prompt, outcome, reason, error, .. } => {
                self.close_question(false);
                self.pending.remove(prompt);
                self.turn_failed = *outcome != TurnOutcome::Completed;
                let stopped = *reason == Some(TurnReason::Budget);
                self.over_budget = stopped.then(|| error.clone().unwrap_or_default());
            }
            EventBody::Pushed { repository, commit, .. } => {
                self.unchecked.insert(repository.clone(), commit.clone());
            }
            EventBody::Evidence(evidence) => self.evidence(evidence),
            // One of these warnings reports a failed check run, which is not retried before the
            // next turn.
            EventBody::Warning { .. } if self.is_at_rest() => self.unchecked.clear(),
            EventBody::StateChanged { state, .. } => self.state = Some(*state),
            _ => {}
        }
        self.verdict()
    }

    /// An answer that did not arrive becomes an ordinary prompt.
    fn close_question(&mut self, answered: bool) {
        self.question = None;
        self.pending.extend(self.answer.take().filter(|_| !answered));
    }

    fn evidence(&mut self, evidence: &Evidence) {
        let name = evidence.repository.clone();
        self.unchecked
            .retain(|other, commit| *commit != evidence.commit || *other != evidence.repository);
        if evidence.outcome == CheckOutcome::Failed {
            self.failed_checks.insert(name);
        } else {
            self.failed_checks.remove(&name);
        }
    }

    fn is_at_rest(&self) -> bool {
        matches!(self.state, Some(SessionState::Idle | SessionState::Paused))
            && self.pending.is_empty()
    }

    fn verdict(&self) -> Option<Verdict> {
        match self.state? {
            SessionState::NeedsInput => Some(Verdict::NeedsInput),
            SessionState::Failed | SessionState::Archived => Some(Verdict::Failed),
            _ if self.is_at_rest() && self.unchecked.is_empty() => {
                Some(if self.turn_failed || !self.failed_checks.is_empty() {
                    Verdict::Failed
                } else {
                    Verdict::Succeeded
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{StateReason, Timestamp, bridge::Exit};

    fn prompt(number: u32) -> PromptId {
        format!("prm_{number:012}").parse().unwrap()
    }

    fn queued() -> EventBody {
        queued_as(1)
    }

    fn queued_as(number: u32) -> EventBody {
        let prompt = prompt(number);
        EventBody::PromptQueued {
            prompt,
            text: String::new(),
            author: String::new(),
            attachments: Vec::new(),
        }
    }

    fn ended(outcome: TurnOutcome) -> EventBody {
        EventBody::TurnEnded { prompt: prompt(1), outcome, reason: None, error: None, millis: 1 }
    }

    fn asked() -> EventBody {
        let (request, question) = ("r".to_owned(), "Which?".to_owned());
        EventBody::RequestOpened { request, question, options: vec!["a".into()] }
    }

    fn now(state: SessionState) -> EventBody {
        EventBody::StateChanged { state, reason: StateReason::Turn, detail: None }
    }

    fn verdict(bodies: &[EventBody]) -> Option<Verdict> {
        let mut tracker = CompletionTracker::default();
        bodies.iter().map(|body| tracker.event(body)).last().flatten()
    }

    #[test]
    fn done_when_idle_with_empty_queue() {
        let completed = TurnOutcome::Completed;
        assert_eq!(
            verdict(&[queued(), now(SessionState::Starting), now(SessionState::Idle)]),
            None
        );
        let other = queued_as(2);
        assert_eq!(verdict(&[queued(), other, ended(completed), now(SessionState::Idle)]), None);
        assert_eq!(
            verdict(&[queued(), ended(completed), now(SessionState::Idle)]),
            Some(Verdict::Succeeded)
        );
        assert_eq!(
            verdict(&[queued(), ended(TurnOutcome::Failed), now(SessionState::Idle)]),
            Some(Verdict::Failed)
        );
        assert_eq!(verdict(&[queued(), now(SessionState::NeedsInput)]), Some(Verdict::NeedsInput));
        assert_eq!(verdict(&[queued(), now(SessionState::Failed)]), Some(Verdict::Failed));
    }

    #[test]
    fn answer_is_no_prompt_to_wait_for() {
        let answered = |answer: Option<&str>| {
            let answer = answer.map(str::to_owned);
            let closed = EventBody::RequestClosed { request: "r".into(), answer };
            let turn = [queued(), asked(), now(SessionState::NeedsInput), queued_as(2), closed];
            let end = [ended(TurnOutcome::Completed), now(SessionState::Idle)];
            verdict(&[&turn[..], &end].concat())
        };
        assert_eq!(answered(Some("a")), Some(Verdict::Succeeded));
        assert_eq!(answered(None), None);
    }

    #[test]
    fn turn_of_another_prompt_is_not_the_end() {
        let stopped = EventBody::TurnEnded {
            prompt: prompt(9),
            outcome: TurnOutcome::Stopped,
            reason: None,
            error: None,
            millis: 1,
        };
        assert_eq!(verdict(&[queued(), stopped, now(SessionState::Idle)]), None);
    }

    #[test]
    fn earlier_history_tells_questions_but_no_failures() {
        let mut tracker = CompletionTracker::default();
        let failed = evidence("a", CheckOutcome::Failed);
        for body in [queued_as(1), failed, asked()] {
            tracker.event(&body);
        }
        tracker.begin();
        assert_eq!(tracker.question().unwrap().options, ["a"]);
        let closed = EventBody::RequestClosed { request: "r".into(), answer: Some("a".into()) };
        let rest = [queued_as(2), closed, ended(TurnOutcome::Completed), now(SessionState::Idle)];
        let verdict = rest.iter().map(|body| tracker.event(body)).last().flatten();
        assert_eq!(verdict, Some(Verdict::Succeeded));
    }

    #[test]
    fn later_completed_turn_replaces_failed_one() {
        let bodies =
            [queued(), ended(TurnOutcome::Failed), queued(), ended(TurnOutcome::Completed)];
        assert_eq!(
            verdict(&[&bodies[..], &[now(SessionState::Idle)]].concat()),
            Some(Verdict::Succeeded)
        );
    }

    fn pushed(commit: &str) -> EventBody {
        EventBody::Pushed {
            repository: "local/calc".parse().unwrap(),
            branch: "b".parse().unwrap(),
            commit: commit.into(),
        }
    }

    fn evidence(commit: &str, outcome: CheckOutcome) -> EventBody {
        EventBody::Evidence(Evidence {
            repository: "local/calc".parse().unwrap(),
            commit: commit.into(),
            check: ".harvest/check.sh".into(),
            command: ".harvest/check.sh".into(),
            base: None,
            base_commit: None,
            changed: Vec::new(),
            changed_count: 0,
            snapshot_id: None,
            outcome,
            exit: Exit::Code(1),
            millis: 1,
            tail: String::new(),
            at: Timestamp::from_millis(0),
        })
    }

    #[test]
    fn not_done_before_pushed_commits_are_checked() {
        let turn = [
            queued(),
            pushed("a"),
            pushed("b"),
            ended(TurnOutcome::Completed),
            now(SessionState::Idle),
        ];
        let after = |bodies: &[EventBody]| verdict(&[&turn[..], bodies].concat());
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[evidence("a", CheckOutcome::Passed)]), None);
        assert_eq!(after(&[evidence("b", CheckOutcome::Passed)]), Some(Verdict::Succeeded));
        assert_eq!(after(&[evidence("b", CheckOutcome::Failed)]), Some(Verdict::Failed));
        assert_eq!(after(&[evidence("b", CheckOutcome::NoneDeclared)]), Some(Verdict::Succeeded));
        let failed = EventBody::Warning { message: "the pushed commit is not reviewed yet".into() };
        assert_eq!(after(&[failed]), Some(Verdict::Succeeded));
    }

    #[test]
    fn every_repository_needs_its_own_check() {
        let push = |name: &str| EventBody::Pushed {
            repository: name.parse().unwrap(),
            branch: "b".parse().unwrap(),
            commit: "same".into(),
        };
        let checked = |name: &str, outcome| {
            let EventBody::Evidence(evidence) = evidence("same", outcome) else { panic!() };
            EventBody::Evidence(Evidence { repository: name.parse().unwrap(), ..evidence })
        };
        let turn = [
            queued(),
            push("acme/web"),
            push("acme/api"),
            ended(TurnOutcome::Completed),
            now(SessionState::Idle),
        ];
        let after = |bodies: &[EventBody]| verdict(&[&turn[..], bodies].concat());
        assert_eq!(after(&[checked("acme/web", CheckOutcome::Passed)]), None);
        assert_eq!(
            after(&[
                checked("acme/web", CheckOutcome::Passed),
                checked("acme/api", CheckOutcome::Passed)
            ]),
            Some(Verdict::Succeeded)
        );
        assert_eq!(
            after(&[
                checked("acme/web", CheckOutcome::Failed),
                checked("acme/api", CheckOutcome::Passed)
            ]),
            Some(Verdict::Failed)
        );
    }

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn heartbeats_and_unknown_events_are_skipped() {
        assert_eq!(parse_frame(&lines(": heartbeat")).unwrap(), None);
        let unknown = r#"data: {"seq":1,"at":"1970-01-01T00:00:00.000Z","type":"from_the_future"}"#;
        assert_eq!(parse_frame(&lines(unknown)).unwrap(), None);
        assert!(parse_frame(&lines("data: {")).is_err());
        let unknown = unknown.strip_prefix("data: ").unwrap();
        assert_eq!(known_event(serde_json::from_str(unknown).unwrap()), None);
    }

    #[test]
    fn frame_parses_as_event() {
        let body = EventBody::TextDelta { text: "hi".into() };
        let event = Event { seq: 7, at: Timestamp::from_millis(0), turn: None, body };
        let frame = format!("id: 7\ndata: {}", serde_json::to_string(&event).unwrap());
        assert_eq!(parse_frame(&lines(&frame)).unwrap(), Some(Update::Event(Box::new(event))));
    }

    #[tokio::test]
    async fn lines_are_joined_across_chunks() {
        let pieces: Vec<Result<Vec<u8>>> =
            b"{\"a\":1}\n\n[2]\n".chunks(3).map(|p| Ok(p.to_vec())).collect();
        let mut lines =
            Lines { bytes: futures_util::stream::iter(pieces).boxed(), buffer: Vec::new() };
        assert_eq!(lines.line().await.unwrap().as_deref(), Some("{\"a\":1}"));
        assert_eq!(lines.json::<Vec<u8>>().await.unwrap(), Some(vec![2]));
        assert_eq!(lines.line().await.unwrap(), None);
    }
}
