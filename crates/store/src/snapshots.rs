//! Snapshots: which session may start from which. A fork has its own row for the snapshot it
//! started from, so that the snapshot outlives the session that took it.

use std::collections::HashSet;

use harvest_proto::{
    SessionId, SnapshotId, Timestamp, TurnId, api::Snapshot, bridge::Author, event::SnapshotKind,
};

use crate::{
    DbConnection, DbRow, Lease, Removal, Store, StoreError, leases, removals,
    reserve::OnFullDisk,
    row::{self, to_enum_name},
    target::Target,
};

impl Store {
    /// A session's snapshots, oldest first.
    pub async fn snapshot_list(&self, session: &SessionId) -> Result<Vec<Snapshot>, StoreError> {
        let query =
            sqlx::query("SELECT * FROM snapshots WHERE session = $1 ORDER BY created_at, id")
                .bind(session.to_string());
        self.all(query, read).await
    }

    /// Authors of the sessions that have this snapshot.
    pub async fn snapshot_authors(&self, snapshot: &SnapshotId) -> Result<Vec<Author>, StoreError> {
        let query = sqlx::query(
            "SELECT s.author_name, s.author_email FROM sessions s JOIN snapshots p ON p.session = s.id
             WHERE p.id = $1 ORDER BY s.created_at, s.id",
        )
        .bind(snapshot.to_string());
        self.all(query, row::author).await
    }

    /// All snapshots of all sessions.
    pub async fn snapshot_all(&self) -> Result<Vec<(SessionId, Snapshot)>, StoreError> {
        let query = sqlx::query("SELECT * FROM snapshots ORDER BY session, created_at, id");
        self.all(query, |row| Ok((row::parsed(row, "session")?, read(row)?))).await
    }

    /// The ids of all snapshots of sessions, also of damaged rows.
    pub async fn snapshot_ids(&self) -> Result<HashSet<SnapshotId>, StoreError> {
        let query = sqlx::query("SELECT id FROM snapshots");
        self.all(query, |row| row::parsed(row, "id")).await
    }

    /// Snapshots of builds, ready or in progress.
    pub async fn snapshot_of_builds(&self) -> Result<HashSet<SnapshotId>, StoreError> {
        let query =
            sqlx::query("SELECT snapshot FROM builds WHERE status IN ('building', 'ready')");
        self.all(query, |row| row::parsed(row, "snapshot")).await
    }

    /// Pins or unpins a snapshot: retention never removes a pinned one.
    pub async fn snapshot_pin(
        &self,
        session: &SessionId,
        lease: Lease,
        snapshot: &SnapshotId,
        pinned: bool,
    ) -> Result<(), StoreError> {
        let sql = "UPDATE snapshots SET pinned = $3 WHERE session = $1 AND id = $2";
        match self.set_flag(sql, session, lease, snapshot, pinned).await? {
            0 => Err(StoreError::missing(format!("snapshot {snapshot} in session {session}"))),
            _ => Ok(()),
        }
    }

    /// Records whether a snapshot is missing on the disk. Returns `false` when the session does
    /// not have the snapshot any more.
    pub async fn snapshot_gone(
        &self,
        session: &SessionId,
        lease: Lease,
        snapshot: &SnapshotId,
        gone: bool,
    ) -> Result<bool, StoreError> {
        let sql = "UPDATE snapshots SET gone = $3 WHERE session = $1 AND id = $2";
        Ok(self.set_flag(sql, session, lease, snapshot, gone).await? > 0)
    }

    async fn set_flag(
        &self,
        sql: &'static str,
        session: &SessionId,
        lease: Lease,
        snapshot: &SnapshotId,
        flag: bool,
    ) -> Result<u64, StoreError> {
        let query = sqlx::query(sql)
            .bind(session.to_string())
            .bind(snapshot.to_string())
            .bind(i64::from(flag));
        self.writer.execute(Some(lease), query).await
    }

    /// Removes these snapshots from a session, except those that are pinned or in use by its
    /// driver: both may have changed since the snapshots were chosen. `why` is stored with the
    /// turns that lose their snapshot. Snapshots without another user get a removal; returns these.
    pub async fn snapshot_drop(
        &self,
        session: &SessionId,
        lease: Lease,
        snapshots: Vec<SnapshotId>,
        why: &'static str,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        let session = session.to_string();
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let mut dropped = Vec::new();
                    for snapshot in snapshots {
                        if drop_one(connection, &session, &snapshot, why).await? {
                            let removal = Removal::Snapshot(snapshot);
                            removals::insert(connection, &removal, at).await?;
                            dropped.push(removal);
                        }
                    }
                    Ok(dropped)
                })
            })
            .await
    }
}

/// Returns whether no other session uses the snapshot.
async fn drop_one(
    connection: &mut DbConnection,
    session: &str,
    snapshot: &SnapshotId,
    why: &'static str,
) -> Result<bool, StoreError> {
    let id = snapshot.to_string();
    let gone = sqlx::query(
        "DELETE FROM snapshots WHERE session = $1 AND id = $2 AND pinned = 0 AND NOT EXISTS
         (SELECT 1 FROM sessions s WHERE s.id = $1 AND (s.snapshot = $2 OR s.driver_state LIKE $3))",
    )
    .bind(session.to_owned())
    .bind(id.clone())
    .bind(format!("%{id}%"))
    .execute(&mut *connection)
    .await?;
    if gone.rows_affected() == 0 {
        return Ok(false);
    }
    sqlx::query(
        "UPDATE turns SET snapshot = NULL, drop_reason = $3 WHERE session = $1 AND snapshot = $2",
    )
    .bind(session.to_owned())
    .bind(id.clone())
    .bind(why)
    .execute(&mut *connection)
    .await?;
    let used = sqlx::query("SELECT COUNT(*) AS used FROM snapshots WHERE id = $1")
        .bind(id)
        .fetch_one(connection)
        .await?;
    Ok(row::count::<u64>(&used, "used")? == 0)
}

fn read(row: &DbRow) -> Result<Snapshot, StoreError> {
    Ok(Snapshot {
        id: row::parsed(row, "id")?,
        kind: row::enum_name(row, "kind")?,
        turn: row::count_optional(row, "turn")?,
        pinned: row::count::<u64>(row, "pinned")? != 0,
        gone: row::count::<u64>(row, "gone")? != 0,
        name: row::optional(row, "name")?,
        // Only the provider knows.
        durable: false,
        created_at: row::time(row, "created_at")?,
    })
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
    .bind(to_enum_name(&kind))
    .bind(turn.clone())
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await?;
    let query = target
        .query("UPDATE turns SET snapshot = $3 WHERE session = $1 AND id = $2")
        .bind(turn)
        .bind(snapshot.to_string());
    target.execute(query).await.map(drop)
}

pub(crate) async fn name(
    target: &mut Target<'_>,
    snapshot: &SnapshotId,
    name: String,
) -> Result<(), StoreError> {
    let query = target
        .query("UPDATE snapshots SET name = $3, pinned = 1 WHERE session = $1 AND id = $2")
        .bind(snapshot.to_string())
        .bind(name);
    target.execute(query).await.map(drop)
}

/// Adds another session's snapshot as turn 0 of this session. The snapshot must still exist.
pub(crate) async fn share(
    target: &mut Target<'_>,
    snapshot: &SnapshotId,
    at: Timestamp,
) -> Result<(), StoreError> {
    let shared = sqlx::query(
        "INSERT INTO snapshots (id, session, kind, turn, created_at)
         SELECT id, $2, kind, 0, $3 FROM snapshots WHERE id = $1 AND gone = 0 LIMIT 1
         ON CONFLICT (session, id) DO NOTHING",
    )
    .bind(snapshot.to_string())
    .bind(target.session.to_string())
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await?;
    if shared.rows_affected() == 0 {
        return Err(StoreError::missing(format!("snapshot {snapshot}")));
    }
    Ok(())
}
