//! Blobs: the whole of what an event holds only the ends of. Text, kept in pieces, for as long as its
//! session.

use harvest_proto::{BlobId, SessionId, Timestamp};

use crate::{
    DbConnection, Lease, Store, StoreError,
    row::{self, bigint, to_json},
    writer::Done,
};

// A row stays small; so does what a reader that stops early has read for nothing.
const PIECE_BYTES: usize = 64 * 1024;

impl Store {
    /// Keeps a blob, unless the session's blobs would take more than `quota` bytes then. The second time it
    /// only answers. True when it is there.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over; [`StoreError::NotFound`] when the
    /// session is gone.
    pub async fn blob_put(
        &self,
        session: &SessionId,
        lease: Lease,
        id: &BlobId,
        text: String,
        quota: u64,
        at: Timestamp,
    ) -> Result<bool, StoreError> {
        let (session, id) = (session.to_string(), id.to_string());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    crate::leases::check(connection, lease).await?;
                    let room = room(connection, &session, &id, text.len() as u64, quota).await?;
                    if room == Room::Taken {
                        return Ok(Done::from(true));
                    }
                    if room == Room::None {
                        return Ok(Done::from(false));
                    }
                    insert(connection, &session, &id, &text, at).await?;
                    Ok(Done::from(true))
                })
            })
            .await
    }

    /// A blob.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] when there is none of that id in the session.
    pub async fn blob_get(&self, session: &SessionId, id: &BlobId) -> Result<String, StoreError> {
        let rows = sqlx::query(
            "SELECT text FROM blob_pieces WHERE session = $1 AND id = $2 ORDER BY number",
        )
        .bind(session.to_string())
        .bind(id.to_string())
        .fetch_all(&self.readers)
        .await?;
        if rows.is_empty() {
            return Err(StoreError::missing(format!("blob {id} in session {session}")));
        }
        rows.iter().map(|row| row::json::<String>(row, "text")).collect()
    }
}

#[derive(PartialEq)]
enum Room {
    /// It is there already.
    Taken,
    Enough,
    None,
}

async fn room(
    connection: &mut DbConnection,
    session: &str,
    id: &str,
    bytes: u64,
    quota: u64,
) -> Result<Room, StoreError> {
    let found = sqlx::query(
        "SELECT (SELECT COUNT(*) FROM sessions WHERE id = $1) AS sessions,
                (SELECT COUNT(*) FROM blobs WHERE session = $1 AND id = $2) AS same,
                (SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM blobs WHERE session = $1) AS bytes",
    )
    .bind(session)
    .bind(id)
    .fetch_one(&mut *connection)
    .await?;
    if row::count::<u64>(&found, "sessions")? == 0 {
        return Err(StoreError::missing(format!("session {session}")));
    }
    if row::count::<u64>(&found, "same")? > 0 {
        return Ok(Room::Taken);
    }
    let taken: u64 = row::count(&found, "bytes")?;
    Ok(if taken.saturating_add(bytes) <= quota { Room::Enough } else { Room::None })
}

async fn insert(
    connection: &mut DbConnection,
    session: &str,
    id: &str,
    text: &str,
    at: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO blobs (session, id, bytes, created_at) VALUES ($1, $2, $3, $4)")
        .bind(session)
        .bind(id)
        .bind(bigint(text.len() as u64))
        .bind(at.as_millis())
        .execute(&mut *connection)
        .await?;
    for (number, piece) in pieces(text).enumerate() {
        sqlx::query("INSERT INTO blob_pieces (session, id, number, text) VALUES ($1, $2, $3, $4)")
            .bind(session)
            .bind(id)
            .bind(bigint(number as u64))
            // As JSON: a text may hold a zero, which not every database can keep.
            .bind(to_json(&piece))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

// At least one, also of nothing.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let (piece, after) = text.split_at(text.floor_char_boundary(PIECE_BYTES));
        rest = (!after.is_empty()).then_some(after);
        Some(piece)
    })
}
