//! A session's events: replayed from the store, then followed as they are stored. A follower that
//! falls behind reads from the store again, so it gets every event once and in order.

use std::{collections::VecDeque, io, sync::Arc};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{BlobId, Event, SessionId, api::Session};
use harvest_store::Store;
use tokio::sync::broadcast::{self, error::RecvError};

use super::Sessions;
use crate::error::SessionError;

// The events of a batch are in memory while a client does not read.
const BATCH_BYTES: usize = 256 * 1024;

// Large events first become known when they are read.
const FIRST_BATCH: u32 = 16;
const MAX_BATCH: u32 = 500;

impl Sessions {
    /// A session's events after number `after`, at most `limit`.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn events(
        &self,
        session: &SessionId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<Event>, SessionError> {
        let events = self.shared.store.event_list(session, after, limit.clamp(1, 1000)).await?;
        self.exists_if_empty(session, events).await
    }

    /// A session as it is now, and its events after number `after`, including future ones. The
    /// stream ends when the session is deleted or the store fails.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn follow(
        &self,
        session: &SessionId,
        after: u64,
    ) -> Result<(Session, BoxStream<'static, Event>), SessionError> {
        // Subscribes before the first read, so that no event falls between the two.
        let news = self.shared.store.event_follow(session);
        let now = self.get(session).await?;
        let follower = Follower {
            store: self.shared.store.clone(),
            session: session.clone(),
            news,
            seen: after,
            read: VecDeque::new(),
            batch: FIRST_BATCH,
            behind: true,
        };
        let events = stream::unfold(follower, |mut follower| async move {
            let event = follower.next().await?;
            Some((event, follower))
        });
        Ok((now, events.boxed()))
    }

    /// The full text of which an event holds only the ends.
    ///
    /// # Errors
    /// When there is no such blob in the session.
    pub async fn blob(&self, session: &SessionId, blob: &BlobId) -> Result<String, SessionError> {
        Ok(self.shared.store.blob_get(session, blob).await?)
    }
}

struct Follower {
    store: Store,
    session: SessionId,
    news: broadcast::Receiver<Arc<Event>>,
    seen: u64,
    read: VecDeque<Event>,
    /// The number of events to read at once.
    batch: u32,
    /// The store may have more events than were read.
    behind: bool,
}

impl Follower {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.read.pop_front() {
                self.seen = event.seq;
                return Some(event);
            }
            if self.behind {
                let read =
                    self.store.event_list(&self.session, self.seen, self.batch).await.ok()?;
                self.behind = read.len() == self.batch as usize;
                self.batch = next_batch(self.batch, read.iter().map(size).sum());
                self.read = read.into();
                if !self.read.is_empty() {
                    continue;
                }
            }
            match self.news.recv().await {
                Ok(event) if event.seq <= self.seen => {}
                Ok(event) if event.seq == self.seen + 1 => {
                    self.seen = event.seq;
                    return Some(Event::clone(&event));
                }
                Ok(_) | Err(RecvError::Lagged(_)) => self.behind = true,
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

/// The number of events to read next, after a batch of this many bytes.
fn next_batch(batch: u32, bytes: usize) -> u32 {
    match bytes {
        _ if bytes > BATCH_BYTES => (batch / 2).max(1),
        _ if bytes < BATCH_BYTES / 4 => (batch * 2).min(MAX_BATCH),
        _ => batch,
    }
}

/// The size of an event as JSON.
fn size(event: &Event) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, event).expect("an event holds only maps with text keys");
    count.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_large_events_are_small() {
        let settle = |event_bytes: usize| {
            (0..20).fold(FIRST_BATCH, |batch, _| next_batch(batch, batch as usize * event_bytes))
        };
        assert_eq!(settle(100), MAX_BATCH);
        assert_eq!(settle(10 * BATCH_BYTES), 1);
        for event_bytes in [1_000, 20_000, 100_000] {
            let bytes = settle(event_bytes) as usize * event_bytes;
            assert!(bytes <= BATCH_BYTES, "{event_bytes}: {bytes}");
        }
    }
}
