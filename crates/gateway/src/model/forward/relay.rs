//! Relays the body of a response to the agent and counts its tokens. Reads the rest of it when the
//! agent has disconnected, or does not read: a budget holds the call until it is settled.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::{sync::Notify, time::timeout};

use crate::{
    http::{Abort, BodyError, BodySender},
    model::{chat_usage::UsageFilter, usage::Meter},
};

pub(super) struct Relay<'a> {
    pub(super) meter: &'a mut Meter,
    /// Removes what the agent did not ask for.
    pub(super) filter: Option<UsageFilter>,
    /// Notified when the agent has disconnected.
    pub(super) gone: &'a Notify,
    /// How long the agent may still be waited for: an agent that reads a little from time to time
    /// must not hold the call for days.
    pub(super) patience: Duration,
}

impl Relay<'_> {
    /// Forwards a response as it arrives, no faster than the agent reads it. Returns whether it was
    /// read to its end.
    pub(super) async fn run(
        &mut self,
        mut chunks: impl Stream<Item = Result<Bytes, BodyError>> + Unpin,
        sender: Option<BodySender>,
    ) -> bool {
        let mut agent = sender;
        if agent.is_none() {
            self.gone.notify_one();
        }
        loop {
            let chunk = match &agent {
                Some(sender) => tokio::select! {
                    chunk = chunks.next() => chunk,
                    () = sender.closed() => {
                        agent = self.leave();
                        continue;
                    }
                },
                None if self.meter.is_closed() => return true,
                None => chunks.next().await,
            };
            let Some(chunk) = chunk else { break };
            if let Ok(chunk) = &chunk {
                self.meter.observe(chunk);
            }
            let cut = chunk.is_err();
            if let Some(sender) = agent.take() {
                // An error is sent too: the agent must see a cut connection, not a response that
                // seems complete.
                let chunk = chunk.map(|chunk| self.filtered(chunk));
                agent = self.send(sender, chunk).await;
                if agent.is_none() {
                    self.leave();
                }
            }
            if cut {
                return false;
            }
        }
        let rest = self.filter.as_mut().map(UsageFilter::finish).unwrap_or_default();
        if let Some(sender) = agent {
            self.send(sender, Ok(rest)).await;
        }
        true
    }

    /// The agent no longer reads.
    fn leave(&self) -> Option<BodySender> {
        self.gone.notify_one();
        None
    }

    fn filtered(&mut self, chunk: Bytes) -> Bytes {
        match &mut self.filter {
            Some(filter) => filter.push(&chunk),
            None => chunk,
        }
    }

    /// Sends a chunk. Returns the sender if the agent still reads.
    async fn send(
        &mut self,
        sender: BodySender,
        chunk: Result<Bytes, BodyError>,
    ) -> Option<BodySender> {
        if chunk.as_ref().is_ok_and(Bytes::is_empty) {
            return Some(sender);
        }
        let waiting = Instant::now();
        let reserved = timeout(self.patience, sender.clone().reserve_owned()).await;
        self.patience = self.patience.saturating_sub(waiting.elapsed());
        match reserved {
            Ok(Ok(place)) => Some(place.send(chunk)),
            Ok(Err(_)) => None,
            Err(_) => {
                // An agent that reads on must not take what it has for the whole response. The task
                // ends with its connection.
                tokio::spawn(async move { sender.send(Err(Abort.into())).await });
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use harvest_proto::event::Usage;
    use tokio::sync::mpsc;

    use super::*;
    use crate::{ledger::Used, model::Endpoint};

    const START: &str = "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n";
    const TEXT: &str = "data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"hello there, you\"}}\n\n";
    const END: &str = "data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":5000}}\n\n";

    fn usage(output_tokens: u64) -> Usage {
        Usage { input_tokens: 10, output_tokens, ..Usage::default() }
    }

    async fn relay(
        chunks: impl Stream<Item = Result<Bytes, BodyError>> + Unpin,
        sender: Option<BodySender>,
    ) -> (Used, bool) {
        let gone = Notify::new();
        let mut meter = Meter::new(Endpoint::Messages, "text/event-stream", 400);
        let patience = Duration::ZERO;
        let mut relay = Relay { meter: &mut meter, filter: None, gone: &gone, patience };
        let complete = relay.run(chunks, sender).await;
        let is_gone = timeout(Duration::ZERO, gone.notified()).await.is_ok();
        (meter.used(complete), is_gone)
    }

    fn chunks(list: Vec<&'static str>) -> impl Stream<Item = Result<Bytes, BodyError>> + Unpin {
        stream::iter(list.into_iter().map(|text| Ok(Bytes::from(text))))
    }

    #[tokio::test]
    async fn cut_response_is_counted_to_its_end() {
        let (sender, mut receiver) = mpsc::channel::<Result<Bytes, BodyError>>(2);
        let agent = async move { receiver.recv().await.unwrap().unwrap() };
        let rest = stream::once(async { Ok(Bytes::from(START)) }).chain(stream::once(async {
            tokio::task::yield_now().await;
            Ok(Bytes::from(END))
        }));
        let (used, first) = tokio::join!(relay(rest.boxed(), Some(sender)), agent);
        assert_eq!((used, &*first), ((Used::Counted(usage(5000)), true), START.as_bytes()));
    }

    #[tokio::test]
    async fn broken_response_is_known_in_part() {
        let broken = chunks(vec![START, TEXT]).chain(stream::iter([Err(Abort.into())]));
        let (used, _) = relay(broken.boxed(), None).await;
        assert_eq!(used, Used::AtLeast(usage(4)));
        let (used, _) = relay(chunks(vec![START, TEXT]), None).await;
        assert_eq!(used, Used::Counted(usage(4)), "the service itself ended it without counts");
    }

    #[tokio::test]
    async fn unread_response_releases_its_hold() {
        let (sender, mut receiver) = mpsc::channel(2);
        let all = chunks(vec![START, TEXT, TEXT, TEXT, END]);
        assert_eq!(relay(all, Some(sender)).await, (Used::Counted(usage(5000)), true));
        let mut received = Vec::new();
        while let Some(chunk) = receiver.recv().await {
            received.push(chunk.is_ok());
        }
        assert_eq!(received, [true, true, false], "a late reader sees a cut response");
    }
}
