//! Snapshots: which session may start from which. A fork holds a row of its own for the snapshot it
//! began with, so that the snapshot outlives the session that took it.

use harvest_proto::{SessionId, SnapshotId, Timestamp, TurnId, api::Snapshot, event::SnapshotKind};

use crate::{
    Lease, Store, StoreError,
    commit::Target,
    leases,
    row::{self, to_word},
};

impl Store {
    /// A session's snapshots, oldest first.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn snapshot_list(&self, session: &SessionId) -> Result<Vec<Snapshot>, StoreError> {
        let rows = sqlx::query("SELECT * FROM snapshots WHERE session = $1 ORDER BY created_at, id")
            .bind(session.to_string())
            .fetch_all(&self.readers)
            .await?;
        rows.iter()
            .map(|row| {
                Ok(Snapshot {
                    id: row::parsed(row, "id")?,
                    kind: row::word(row, "kind")?,
                    turn: row::count_optional(row, "turn")?,
                    created_at: row::time(row, "created_at")?,
                })
            })
            .collect()
    }

    /// Whether some session may start from it.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn snapshot_of_a_session(&self, snapshot: &SnapshotId) -> Result<bool, StoreError> {
        let row = sqlx::query("SELECT COUNT(*) AS used FROM snapshots WHERE id = $1")
            .bind(snapshot.to_string())
            .fetch_one(&self.readers)
            .await?;
        Ok(row::count::<u64>(&row, "used")? > 0)
    }
}

impl Store {
    /// Forgets a session's snapshots but the newest. Answers those nobody else uses.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn snapshot_trim(
        &self,
        session: &SessionId,
        lease: Lease,
        newest: &SnapshotId,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        let (session, newest) = (session.to_string(), newest.to_string());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    sqlx::query("UPDATE turns SET snapshot = NULL WHERE session = $1 AND snapshot <> $2")
                        .bind(session.clone())
                        .bind(newest.clone())
                        .execute(&mut *connection)
                        .await?;
                    let rows =
                        sqlx::query("DELETE FROM snapshots WHERE session = $1 AND id <> $2 RETURNING id")
                            .bind(session)
                            .bind(newest)
                            .fetch_all(&mut *connection)
                            .await?;
                    let mut orphans = Vec::new();
                    for row in &rows {
                        let id: SnapshotId = row::parsed(row, "id")?;
                        let used = sqlx::query("SELECT COUNT(*) AS used FROM snapshots WHERE id = $1")
                            .bind(id.to_string())
                            .fetch_one(&mut *connection)
                            .await?;
                        if row::count::<u64>(&used, "used")? == 0 {
                            orphans.push(id);
                        }
                    }
                    Ok(orphans.into())
                })
            })
            .await
    }
}

pub(crate) async fn insert(
    target: &mut Target<'_>,
    snapshot: &SnapshotId,
    kind: SnapshotKind,
    turn: Option<&TurnId>,
    at: Timestamp,
) -> Result<(), StoreError> {
    let turn = turn.map(ToString::to_string);
    sqlx::query(
        "INSERT INTO snapshots (id, session, kind, turn, created_at)
         VALUES ($1, $2, $3, (SELECT number FROM turns WHERE session = $2 AND id = $4), $5)
         ON CONFLICT (session, id) DO NOTHING",
    )
    .bind(snapshot.to_string())
    .bind(target.session.to_string())
    .bind(to_word(&kind))
    .bind(turn.clone())
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await?;
    sqlx::query("UPDATE turns SET snapshot = $3 WHERE session = $1 AND id = $2")
        .bind(target.session.to_string())
        .bind(turn)
        .bind(snapshot.to_string())
        .execute(&mut *target.connection)
        .await?;
    Ok(())
}
