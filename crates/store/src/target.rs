//! The session that a commit changes, while its writes are applied. `write.rs` stores the rest at
//! the end: the events, the outbox number and the next event number.

use std::sync::Arc;

use harvest_proto::{Event, EventBody, SessionId, Timestamp, TurnId};

use sqlx::SqlSafeStr;

use crate::{DbConnection, DbQuery, StoreError};

pub(crate) struct Target<'c> {
    pub(crate) connection: &'c mut DbConnection,
    pub(crate) session: SessionId,
    pub(crate) next_seq: u64,
    /// Appended events, inserted together after all writes.
    pub(crate) events: Vec<Arc<Event>>,
    pub(crate) outbox: Outbox,
}

impl Target<'_> {
    /// A statement whose first parameter is the session.
    pub(crate) fn query(&self, sql: impl SqlSafeStr) -> DbQuery<'static> {
        sqlx::query(sql).bind(self.session.to_string())
    }

    /// Runs a statement; returns the number of changed rows.
    pub(crate) async fn execute(&mut self, query: DbQuery<'_>) -> Result<u64, StoreError> {
        Ok(query.execute(&mut *self.connection).await?.rows_affected())
    }

    /// Appends an event with the session's next number, which it returns.
    pub(crate) fn append(&mut self, at: Timestamp, turn: Option<TurnId>, body: EventBody) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.events.push(Arc::new(Event { seq, at, turn, body }));
        seq
    }
}

/// The highest stored outbox number of a sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outbox {
    pub(crate) epoch: u64,
    pub(crate) stored: u64,
    pub(crate) changed: bool,
}

impl Outbox {
    pub(crate) fn new(epoch: u64, stored: u64) -> Self {
        Self { epoch, stored, changed: false }
    }
}
