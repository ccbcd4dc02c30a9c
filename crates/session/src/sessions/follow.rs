//! A session's events: replayed from the store, then followed as they are stored. A follower that
//! falls behind reads from the store again, so it gets every event once and in order.

use std::{collections::VecDeque, sync::Arc};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{BlobId, Event, SessionId, api::Session};
use harvest_store::Store;
use tokio::sync::broadcast::{self, error::RecvError};

use super::Sessions;
use crate::error::SessionError;

// Events per read of the store; large ones are fewer.
const BATCH: u32 = 500;

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
                let read = self.store.event_list(&self.session, self.seen, BATCH).await.ok()?;
                self.behind = !read.is_empty();
                self.read = read.into();
                if self.behind {
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
