//! Events: numbered per session without gap or repeat, append-only.

use std::sync::Arc;

use harvest_proto::{Event, EventBody, SessionId, Timestamp, TurnId, bridge::OutboxEvent};

use crate::{
    DbRow, Store, StoreError,
    commit::Target,
    row::{self, bigint, to_json},
};

impl Store {
    /// A session's events after number `after`, oldest first, at most `limit`.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn event_list(
        &self,
        session: &SessionId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let rows = sqlx::query(
            "SELECT seq, at, turn, body FROM events WHERE session = $1 AND seq > $2 ORDER BY seq LIMIT $3",
        )
        .bind(session.to_string())
        .bind(bigint(after))
        .bind(i64::from(limit))
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(event).collect()
    }

    /// The highest outbox number of a sandbox that is stored.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn outbox_stored(&self, session: &SessionId, epoch: u64) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT stored FROM outboxes WHERE session = $1 AND epoch = $2")
            .bind(session.to_string())
            .bind(bigint(epoch))
            .fetch_optional(&self.readers)
            .await?;
        row.map_or(Ok(0), |row| row::count(&row, "stored"))
    }
}

fn event(row: &DbRow) -> Result<Event, StoreError> {
    Ok(Event {
        seq: row::count(row, "seq")?,
        at: row::time(row, "at")?,
        turn: row::parsed_optional(row, "turn")?,
        body: row::json(row, "body")?,
    })
}

/// Appends with the session's next number, and says which that was.
pub(crate) async fn append(
    target: &mut Target<'_>,
    at: Timestamp,
    turn: Option<TurnId>,
    body: EventBody,
) -> Result<u64, StoreError> {
    let seq = target.next_seq;
    sqlx::query("INSERT INTO events (session, seq, at, turn, body) VALUES ($1, $2, $3, $4, $5)")
        .bind(target.session.to_string())
        .bind(bigint(seq))
        .bind(at.as_millis())
        .bind(turn.as_ref().map(ToString::to_string))
        .bind(to_json(&body))
        .execute(&mut *target.connection)
        .await?;
    target.next_seq += 1;
    target.events.push(Arc::new(Event { seq, at, turn, body }));
    Ok(seq)
}

/// Appends unless the number is stored already. A number that skips one is refused: the supervisor
/// sends everything that is not acknowledged, so a gap means that something is lost.
pub(crate) async fn append_outbox(
    target: &mut Target<'_>,
    epoch: u64,
    event: OutboxEvent,
) -> Result<(), StoreError> {
    let stored = sqlx::query(
        "INSERT INTO outboxes (session, epoch, stored) VALUES ($1, $2, 0)
         ON CONFLICT (session, epoch) DO UPDATE SET stored = outboxes.stored RETURNING stored",
    )
    .bind(target.session.to_string())
    .bind(bigint(epoch))
    .fetch_one(&mut *target.connection)
    .await?;
    let stored: u64 = row::count(&stored, "stored")?;
    if event.number <= stored {
        return Ok(());
    }
    if event.number != stored + 1 {
        return Err(StoreError::OutboxGap { epoch, number: event.number, stored });
    }
    sqlx::query("UPDATE outboxes SET stored = $3 WHERE session = $1 AND epoch = $2")
        .bind(target.session.to_string())
        .bind(bigint(epoch))
        .bind(bigint(event.number))
        .execute(&mut *target.connection)
        .await?;
    append(target, event.at, event.turn, event.body).await.map(drop)
}
