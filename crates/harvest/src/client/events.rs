//! A session's events as they come, across broken connections and restarts of the server.

use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{
    Stream, StreamExt, TryStreamExt,
    stream::{self, LocalBoxStream},
};
use harvest_proto::SessionId;
use reqwest::Method;

use super::Client;
use crate::{
    follow::{Lines, Update, parse_frame},
    printer::Refused,
    socket::heard_in_time,
};

impl Client {
    /// What there is after `after`, and with `follow` also what comes, until somebody presses ctrl-c.
    pub(crate) fn told(
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
                let page = client.events(&id, after).await?;
                let last =
                    page.items.last().filter(|_| page.next_cursor.is_some()).map(|event| event.seq);
                let updates =
                    page.items.into_iter().map(|event| Ok(Update::Event(Box::new(event))));
                Ok(Some((stream::iter(updates), last)))
            }
        });
        pages.try_flatten().boxed_local()
    }

    /// The session as it stands, then every event after `after`, as they come; comes back by itself
    /// when the connection breaks, without a gap and without a repeat.
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

/// Where a stream of events stands.
struct Follower {
    client: Client,
    path: String,
    after: u64,
    lines: Option<Lines>,
}

impl Follower {
    async fn next(&mut self) -> Result<Update> {
        // About a minute in all: long enough for a restart of the server.
        let mut waits = [250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 20_000].into_iter();
        loop {
            let broke = match self.frame().await {
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
            match waits.next() {
                Some(millis) if may_pass(&broke) => {
                    tokio::time::sleep(Duration::from_millis(millis)).await
                }
                _ => return Err(broke),
            }
        }
    }

    /// The next frame of the connection there is, or of a new one.
    async fn frame(&mut self) -> Result<Vec<String>> {
        let lines = match self.lines.take() {
            Some(lines) => lines,
            None => self.connect().await?,
        };
        // Only a heartbeat when nothing happens; a network that is gone says nothing at all.
        let frame = heard_in_time(self.lines.insert(lines).frame()).await??;
        frame.context("the server ended the stream")
    }

    async fn connect(&self) -> Result<Lines> {
        let request =
            self.client.request(Method::GET, &format!("{}?after={}", self.path, self.after));
        let answer = self.client.send(request.header("accept", "text/event-stream")).await?;
        Ok(Lines::new(answer))
    }
}

/// Whether it may be better in a moment: everything but a server that understood and said no.
fn may_pass(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_none_or(|refused| refused.0.status == 503)
}
