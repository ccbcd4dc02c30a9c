//! Follows a session's event stream as a client does: a cursor, and a new connection whenever the
//! old one breaks.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use harvest_proto::{Event, EventBody, SessionId};

use crate::{Host, PATIENCE};

/// Reads a session's events in order, across any number of reconnects.
pub struct Follower<'host> {
    host: &'host Host,
    session: SessionId,
    /// All events received so far.
    pub seen: Vec<Event>,
}

impl<'host> Follower<'host> {
    pub(crate) const fn new(host: &'host Host, session: SessionId) -> Self {
        Self { host, session, seen: Vec::new() }
    }

    /// Follows until an event matches `wanted` and returns it. Events seen before count.
    ///
    /// # Panics
    /// When it does not come, or when a number is skipped or repeated.
    pub async fn until(&mut self, what: &str, wanted: impl Fn(&EventBody) -> bool) -> Event {
        self.after(0, what, wanted).await
    }

    /// Like [`Follower::until`] for events after `seq`.
    ///
    /// # Panics
    /// When it does not come, or when a number is skipped or repeated.
    pub async fn after(
        &mut self,
        seq: u64,
        what: &str,
        wanted: impl Fn(&EventBody) -> bool,
    ) -> Event {
        let begin = Instant::now();
        let matches = |event: &&Event| event.seq > seq && wanted(&event.body);
        loop {
            if let Some(event) = self.seen.iter().find(matches) {
                return event.clone();
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "waited {PATIENCE:?} for {what}; saw {:#?}",
                self.seen
            );
            if self.read_once(&|body| wanted(body)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    /// Reads one connection until a wanted event, the end of the stream or five seconds of silence.
    async fn read_once(
        &mut self,
        wanted: &dyn Fn(&EventBody) -> bool,
    ) -> Result<(), reqwest::Error> {
        let last = self.seen.last().map_or(0, |event| event.seq);
        let path = format!("/v1/sessions/{}/events?after={last}", self.session);
        let answer = self
            .host
            .get(&path)
            .header("accept", "text/event-stream")
            .send()
            .await?
            .error_for_status()?;
        let mut bytes = answer.bytes_stream();
        let mut text = String::new();
        while let Ok(Some(piece)) = tokio::time::timeout(Duration::from_secs(5), bytes.next()).await
        {
            text.push_str(&String::from_utf8_lossy(&piece?));
            while let Some(end) = text.find("\n\n") {
                let frame: String = text.drain(..end + 2).collect();
                if let Some(event) = parse(&frame) {
                    let last = self.seen.last().map_or(0, |event| event.seq);
                    assert_eq!(event.seq, last + 1, "the stream skipped or repeated a number");
                    let done = wanted(&event.body);
                    self.seen.push(event);
                    if done {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// The agent's text so far.
    #[must_use]
    pub fn text(&self) -> String {
        self.seen
            .iter()
            .filter_map(|event| match &event.body {
                EventBody::TextDelta { text } => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }
}

/// The event in a frame that carries one; snapshots and heartbeats have no id.
fn parse(frame: &str) -> Option<Event> {
    frame.lines().find(|line| line.starts_with("id:"))?;
    let data: String = frame.lines().filter_map(|line| line.strip_prefix("data:")).collect();
    Some(serde_json::from_str(&data).expect("an event frame holds an event"))
}
