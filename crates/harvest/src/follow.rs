//! Streams of the API as they arrive: lines, server-sent frames, and when following a session is over.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, stream::BoxStream};
use harvest_proto::{
    Event, EventBody,
    api::{Evidence, Session, SessionState},
    event::TurnOutcome,
};
use serde::de::DeserializeOwned;

// An event is at most 64 KiB and an exec line 64 KiB in base64; far beyond that it is no stream of ours.
const MAX_LINE_BYTES: usize = 4 * 1024 * 1024;

/// What a followed session says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Update {
    /// The session as it stands; comes first, and again after every reconnect.
    Snapshot(Box<Session>),
    /// Something happened.
    Event(Box<Event>),
}

/// An answer read line by line.
pub(crate) struct Lines {
    bytes: BoxStream<'static, Result<Vec<u8>>>,
    buffer: Vec<u8>,
}

impl Lines {
    pub(crate) fn new(answer: reqwest::Response) -> Self {
        let bytes = answer.bytes_stream().map(|piece| Ok(piece.map(Vec::from)?)).boxed();
        Self { bytes, buffer: Vec::new() }
    }

    /// Of an answer that came another way.
    pub(crate) fn of(pieces: BoxStream<'static, std::io::Result<Vec<u8>>>) -> Self {
        Self { bytes: pieces.map(|piece| Ok(piece?)).boxed(), buffer: Vec::new() }
    }

    /// The next line without its end, or `None` at the end of the answer.
    async fn line(&mut self) -> Result<Option<String>> {
        let mut searched = 0;
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.buffer[searched..]) {
                let rest = self.buffer.split_off(searched + end + 1);
                let line = std::mem::replace(&mut self.buffer, rest);
                let text = String::from_utf8(line).context("the answer is not UTF-8")?;
                return Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()));
            }
            searched = self.buffer.len();
            if searched > MAX_LINE_BYTES {
                bail!("the server sent a line longer than {MAX_LINE_BYTES} bytes");
            }
            match self.bytes.next().await {
                Some(piece) => {
                    self.buffer.extend_from_slice(&piece.context("the answer broke off")?)
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => bail!("the answer broke off in the middle of a line"),
            }
        }
    }

    /// The next line as JSON; an empty one only says that the other side is there.
    pub(crate) async fn json<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        while let Some(line) = self.line().await? {
            if !line.is_empty() {
                return Ok(Some(
                    serde_json::from_str(&line).context("cannot make sense of a line")?,
                ));
            }
        }
        Ok(None)
    }

    /// The lines of the next server-sent frame, or `None` at the end of the stream.
    pub(crate) async fn frame(&mut self) -> Result<Option<Vec<String>>> {
        let mut lines = Vec::new();
        while let Some(line) = self.line().await? {
            if line.is_empty() {
                return Ok(Some(lines));
            }
            lines.push(line);
        }
        // What came of an unfinished frame is not to be used, says the specification.
        Ok(None)
    }
}

/// What a server-sent frame says; nothing for a heartbeat.
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
    // A newer server may know kinds of events that we do not; they are not ours to fail on.
    match update {
        Ok(update) => Ok(Some(update)),
        Err(error) if error.is_data() => {
            tracing::warn!(%error, "passed over an event that this version does not understand");
            Ok(None)
        }
        Err(error) => Err(error).context("cannot make sense of an event"),
    }
}

/// How what was followed ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The last turn was completed and nothing refuted it.
    Good,
    /// A turn failed, the session failed, or the check did.
    Bad,
    /// The agent waits for a person.
    Asked,
}

/// Decides when following is over: the session rests, nothing waits in its queue, and what it pushed
/// has been looked at. Pure.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Prompts that have not come to their end.
    pending: usize,
    bad: bool,
    /// Repositories whose newest commit that was looked at did not pass.
    refuted: BTreeSet<String>,
    /// The pushed commits that the platform has not looked at yet, by repository.
    unreviewed: BTreeMap<String, String>,
    state: Option<SessionState>,
}

impl Watch {
    /// `Some` once there is nothing more to wait for.
    pub(crate) fn event(&mut self, body: &EventBody) -> Option<Verdict> {
        match body {
            EventBody::PromptQueued { .. } => self.pending += 1,
            EventBody::PromptCancelled { .. } => self.pending = self.pending.saturating_sub(1),
            EventBody::TurnEnded { outcome, .. } => {
                self.pending = self.pending.saturating_sub(1);
                self.bad = *outcome != TurnOutcome::Completed;
            }
            EventBody::Pushed { repository, commit, .. } => {
                self.unreviewed.insert(repository.clone(), commit.clone());
            }
            EventBody::Evidence(evidence) => self.evidence(evidence),
            // Also what says that the review failed: it is not tried again before the next turn.
            EventBody::Warning { .. } if self.rests() => self.unreviewed.clear(),
            EventBody::StateChanged { state, .. } => self.state = Some(*state),
            _ => {}
        }
        self.verdict()
    }

    fn evidence(&mut self, evidence: &Evidence) {
        let repository = evidence.repository.as_ref();
        let is_it = |name: &String| repository.is_none_or(|repository| repository == name);
        self.unreviewed.retain(|name, commit| *commit != evidence.commit || !is_it(name));
        let name = repository.cloned().unwrap_or_default();
        if is_declared(evidence) && !evidence.passed {
            self.refuted.insert(name);
        } else {
            self.refuted.remove(&name);
        }
    }

    fn rests(&self) -> bool {
        matches!(self.state, Some(SessionState::Idle | SessionState::Paused)) && self.pending == 0
    }

    fn verdict(&self) -> Option<Verdict> {
        match self.state? {
            SessionState::NeedsInput => Some(Verdict::Asked),
            SessionState::Failed | SessionState::Archived => Some(Verdict::Bad),
            _ if self.rests() && self.unreviewed.is_empty() => {
                Some(if self.bad || !self.refuted.is_empty() {
                    Verdict::Bad
                } else {
                    Verdict::Good
                })
            }
            _ => None,
        }
    }
}

/// Whether there was a check to run at all.
pub(crate) fn is_declared(evidence: &Evidence) -> bool {
    evidence.check != "none declared"
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{PromptId, Timestamp, bridge::Exit};

    fn queued() -> EventBody {
        EventBody::PromptQueued {
            prompt: PromptId::random(),
            text: String::new(),
            author: String::new(),
        }
    }

    fn ended(outcome: TurnOutcome) -> EventBody {
        EventBody::TurnEnded { prompt: PromptId::random(), outcome, error: None, millis: 1 }
    }

    fn now(state: SessionState) -> EventBody {
        EventBody::StateChanged { state, reason: String::new(), detail: None }
    }

    fn verdict(bodies: &[EventBody]) -> Option<Verdict> {
        let mut watch = Watch::default();
        bodies.iter().map(|body| watch.event(body)).last().flatten()
    }

    #[test]
    fn following_ends_when_the_queue_is_empty_and_the_session_rests() {
        let good = TurnOutcome::Completed;
        assert_eq!(
            verdict(&[queued(), now(SessionState::Starting), now(SessionState::Idle)]),
            None
        );
        assert_eq!(verdict(&[queued(), queued(), ended(good), now(SessionState::Idle)]), None);
        assert_eq!(verdict(&[queued(), ended(good), now(SessionState::Idle)]), Some(Verdict::Good));
        assert_eq!(
            verdict(&[queued(), ended(TurnOutcome::Failed), now(SessionState::Idle)]),
            Some(Verdict::Bad)
        );
        assert_eq!(verdict(&[queued(), now(SessionState::NeedsInput)]), Some(Verdict::Asked));
        assert_eq!(verdict(&[queued(), now(SessionState::Failed)]), Some(Verdict::Bad));
    }

    #[test]
    fn a_later_good_turn_makes_up_for_a_failed_one() {
        let bodies =
            [queued(), ended(TurnOutcome::Failed), queued(), ended(TurnOutcome::Completed)];
        assert_eq!(
            verdict(&[&bodies[..], &[now(SessionState::Idle)]].concat()),
            Some(Verdict::Good)
        );
    }

    fn pushed(commit: &str) -> EventBody {
        EventBody::Pushed { repository: "calc".into(), branch: "b".into(), commit: commit.into() }
    }

    fn evidence(commit: &str, check: &str, passed: bool) -> EventBody {
        EventBody::Evidence(Evidence {
            repository: None,
            commit: commit.into(),
            check: check.into(),
            passed,
            exit: Exit::Code(1),
            millis: 1,
            tail: String::new(),
            at: Timestamp::from_millis(0),
        })
    }

    #[test]
    fn what_was_pushed_is_waited_for_until_it_has_been_looked_at() {
        let turn = [
            queued(),
            pushed("a"),
            pushed("b"),
            ended(TurnOutcome::Completed),
            now(SessionState::Idle),
        ];
        let after = |bodies: &[EventBody]| verdict(&[&turn[..], bodies].concat());
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[evidence("a", ".harvest/check.sh", true)]), None);
        assert_eq!(after(&[evidence("b", ".harvest/check.sh", true)]), Some(Verdict::Good));
        assert_eq!(after(&[evidence("b", ".harvest/check.sh", false)]), Some(Verdict::Bad));
        assert_eq!(after(&[evidence("b", "none declared", false)]), Some(Verdict::Good));
        let failed = EventBody::Warning { message: "the pushed commit is not reviewed yet".into() };
        assert_eq!(after(&[failed]), Some(Verdict::Good));
    }

    #[test]
    fn following_waits_for_every_repository_and_one_that_passes_does_not_speak_for_another() {
        let push = |name: &str| EventBody::Pushed {
            repository: name.into(),
            branch: "b".into(),
            commit: "same".into(),
        };
        let seen = |name: &str, passed: bool| {
            let EventBody::Evidence(seen) = evidence("same", ".harvest/check.sh", passed) else {
                panic!()
            };
            EventBody::Evidence(Evidence { repository: Some(name.into()), ..seen })
        };
        let turn = [
            queued(),
            push("web"),
            push("api"),
            ended(TurnOutcome::Completed),
            now(SessionState::Idle),
        ];
        let after = |bodies: &[EventBody]| verdict(&[&turn[..], bodies].concat());
        assert_eq!(after(&[seen("web", true)]), None);
        assert_eq!(after(&[seen("web", true), seen("api", true)]), Some(Verdict::Good));
        assert_eq!(after(&[seen("web", false), seen("api", true)]), Some(Verdict::Bad));
    }

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_heartbeat_says_nothing_and_an_unknown_kind_is_passed_over() {
        assert_eq!(parse_frame(&lines(": heartbeat")).unwrap(), None);
        let unknown = r#"data: {"seq":1,"at":"1970-01-01T00:00:00.000Z","type":"from_the_future"}"#;
        assert_eq!(parse_frame(&lines(unknown)).unwrap(), None);
        assert!(parse_frame(&lines("data: {")).is_err());
    }

    #[test]
    fn a_frame_is_an_event() {
        let body = EventBody::TextDelta { text: "hi".into() };
        let event = Event { seq: 7, at: Timestamp::from_millis(0), turn: None, body };
        let frame = format!("id: 7\ndata: {}", serde_json::to_string(&event).unwrap());
        assert_eq!(parse_frame(&lines(&frame)).unwrap(), Some(Update::Event(Box::new(event))));
    }

    #[tokio::test]
    async fn lines_are_whole_whatever_pieces_they_come_in() {
        let pieces: Vec<Result<Vec<u8>>> =
            b"{\"a\":1}\n\n[2]\n".chunks(3).map(|p| Ok(p.to_vec())).collect();
        let mut lines =
            Lines { bytes: futures_util::stream::iter(pieces).boxed(), buffer: Vec::new() };
        assert_eq!(lines.line().await.unwrap().as_deref(), Some("{\"a\":1}"));
        assert_eq!(lines.json::<Vec<u8>>().await.unwrap(), Some(vec![2]));
        assert_eq!(lines.line().await.unwrap(), None);
    }
}
