//! A session's events: replayed from the store, then followed as they are stored. A follower that falls
//! behind reads from the store again, so it sees every event once and in order, whatever its pace.

use std::{collections::VecDeque, sync::Arc};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{Event, SessionId};
use harvest_store::Store;
use tokio::sync::broadcast::{self, error::RecvError};

use crate::{Sessions, error::SessionError};

const REPLAY: u32 = 500;

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
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.event_list(session, after, limit.clamp(1, 1000)).await?)
    }

    /// A session's events after number `after`, and then every one that comes. Ends when the session is
    /// deleted or the store fails.
    ///
    /// # Errors
    /// When there is no such session, or `after` is a number it has not reached.
    pub async fn follow(
        &self,
        session: &SessionId,
        after: u64,
    ) -> Result<BoxStream<'static, Event>, SessionError> {
        // Subscribed first: what is stored from here on is heard, what was stored before is read.
        let news = self.shared.store.event_follow(session);
        let newest = self.shared.store.session_get(session).await?.session.seq;
        if after > newest {
            let what =
                format!("the session has {newest} events, there is none to continue after {after}");
            return Err(SessionError::invalid("invalid_cursor", what));
        }
        let follower = Follower {
            store: self.shared.store.clone(),
            session: session.clone(),
            news,
            seen: after,
            read: VecDeque::new(),
            behind: true,
        };
        Ok(stream::unfold(follower, |mut follower| async move {
            let event = follower.next().await?;
            Some((event, follower))
        })
        .boxed())
    }
}

struct Follower {
    store: Store,
    session: SessionId,
    news: broadcast::Receiver<Arc<Event>>,
    seen: u64,
    read: VecDeque<Event>,
    /// There may be more in the store than we have read.
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
                let read = self.store.event_list(&self.session, self.seen, REPLAY).await.ok()?;
                self.behind = read.len() == REPLAY as usize;
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
