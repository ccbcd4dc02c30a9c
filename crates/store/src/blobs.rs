//! Blobs: the complete content of events that were cut. Stored as text in pieces, deleted with the
//! session.

use harvest_proto::{BlobId, SessionId, Timestamp};

use crate::{
    DbConnection, Lease, Store, StoreError,
    reserve::OnFullDisk,
    row::{self, bigint, to_json},
};

// Keeps rows small, and limits what a reader that stops early has read in vain.
const PIECE_BYTES: usize = 64 * 1024;

impl Store {
    /// Stores a blob unless the session's blobs would exceed `quota` bytes. Returns whether the
    /// blob is stored; storing it again changes nothing.
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
            .run_on(OnFullDisk::Refuse, move |connection| {
                Box::pin(async move {
                    crate::leases::check(connection, lease).await?;
                    match check_quota(connection, &session, &id, text.len() as u64, quota).await? {
                        Quota::AlreadyStored => return Ok(true),
                        Quota::Exceeded => return Ok(false),
                        Quota::Fits => {}
                    }
                    insert(connection, &session, &id, &text, at).await?;
                    Ok(true)
                })
            })
            .await
    }

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
enum Quota {
    AlreadyStored,
    Fits,
    Exceeded,
}

async fn check_quota(
    connection: &mut DbConnection,
    session: &str,
    id: &str,
    bytes: u64,
    quota: u64,
) -> Result<Quota, StoreError> {
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
        return Ok(Quota::AlreadyStored);
    }
    let stored: u64 = row::count(&found, "bytes")?;
    Ok(if stored.saturating_add(bytes) <= quota { Quota::Fits } else { Quota::Exceeded })
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
            // As JSON: the text may contain NUL, which PostgreSQL cannot store.
            .bind(to_json(&piece))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

// An empty text has one empty piece.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let (piece, after) = text.split_at(text.floor_char_boundary(PIECE_BYTES));
        rest = (!after.is_empty()).then_some(after);
        Some(piece)
    })
}
