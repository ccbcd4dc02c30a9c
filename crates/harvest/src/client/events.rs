//! Follows a session's events across broken connections and server restarts.

use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{
    Stream, StreamExt, TryStreamExt,
    stream::{self, LocalBoxStream},
};
use harvest_proto::{Event, SessionId, api::Page};
use reqwest::Method;
use serde_json::Value;

use super::Client;
use crate::{
    follow::{Lines, Update, known_event, parse_frame},
    printer::ApiRefusal,
    socket::with_silence_timeout,
};

impl Client {
    /// The events after `after`; with `follow` also new ones, until Ctrl-C.
    pub(crate) fn events_after(
        &self,
        id: &SessionId,
        after: u64,
        follow: bool,
    ) -> LocalBoxStream<'static, Result<Update>> {
        if follow {
            return self.follow(id, after).take_until(tokio::signal::ctrl_c()).boxed_local();
        }
        let (client, id) = (self.clone(), id.clone());
        let pages = stream::try_unfold(Some(after), move |after| {
            let (client, id) = (client.clone(), id.clone());
            async move {
                let Some(after) = after else { return anyhow::Ok(None) };
                let (events, next) = client.event_page(&id, after, 1000).await?;
                let updates = events.into_iter().map(|event| Ok(Update::Event(Box::new(event))));
                Ok(Some((stream::iter(updates), next)))
            }
        });
        pages.try_flatten().boxed_local()
    }

    /// The last events up to `seq`, at most `limit`.
    pub(crate) async fn events_up_to(
        &self,
        id: &SessionId,
        seq: u64,
        limit: u64,
    ) -> Result<Vec<Event>> {
        let after = seq.saturating_sub(limit);
        match seq - after {
            0 => Ok(Vec::new()),
            events => Ok(self.event_page(id, after, events).await?.0),
        }
    }

    /// The events after `after` that this version knows, and the cursor of the next page.
    async fn event_page(
        &self,
        id: &SessionId,
        after: u64,
        limit: u64,
    ) -> Result<(Vec<Event>, Option<u64>)> {
        let path = format!("/v1/sessions/{id}/events?after={after}&limit={limit}");
        let Page { items, next_cursor } = self.get::<Page<Value>>(&path).await?;
        let last = items.last().and_then(|event| event["seq"].as_u64());
        let next = last.filter(|_| next_cursor.is_some());
        Ok((items.into_iter().filter_map(known_event).collect(), next))
    }

    /// The session's current state, then every event after `after`. Reconnects when the connection
    /// breaks, without gaps or duplicates.
    pub(crate) fn follow(
        &self,
        id: &SessionId,
        after: u64,
    ) -> impl Stream<Item = Result<Update>> + use<> {
        let start = Follower {
            client: self.clone(),
            path: format!("/v1/sessions/{id}/events"),
            after,
            lines: None,
        };
        stream::try_unfold(start, |mut follower| async move {
            let update = follower.next().await?;
            Ok(Some((update, follower)))
        })
    }
}

/// The state of an event stream.
struct Follower {
    client: Client,
    path: String,
    after: u64,
    lines: Option<Lines>,
}

impl Follower {
    async fn next(&mut self) -> Result<Update> {
        // About a minute in total, enough for a restart of the server.
        let mut backoff = [250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 20_000].into_iter();
        loop {
            let error = match self.frame().await {
                Ok(frame) => match parse_frame(&frame)? {
                    Some(Update::Event(event)) if event.seq <= self.after => continue,
                    Some(update) => {
                        if let Update::Event(event) = &update {
                            self.after = event.seq;
                        }
                        return Ok(update);
                    }
                    None => continue,
                },
                Err(error) => error,
            };
            self.lines = None;
            match backoff.next() {
                Some(millis) if is_transient(&error) => {
                    tokio::time::sleep(Duration::from_millis(millis)).await
                }
                _ => return Err(error),
            }
        }
    }

    /// The next frame; connects first if there is no connection.
    async fn frame(&mut self) -> Result<Vec<String>> {
        let lines = match self.lines.take() {
            Some(lines) => lines,
            None => self.connect().await?,
        };
        // An idle stream still has heartbeats: silence means a lost connection.
        let frame = with_silence_timeout(self.lines.insert(lines).frame()).await??;
        frame.context("the server ended the stream")
    }

    async fn connect(&self) -> Result<Lines> {
        let request =
            self.client.request(Method::GET, &format!("{}?after={}", self.path, self.after));
        let response = self.client.send(request.header("accept", "text/event-stream")).await?;
        Ok(Lines::new(response))
    }
}

/// Whether a retry may help: anything but a refusal by the server, except 503.
fn is_transient(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ApiRefusal>().is_none_or(|refused| refused.0.status == 503)
}
