//! Verifications: runs of a repository's check on a commit, and the snapshots that they leave.

use harvest_proto::{
    RepositoryName, SessionId, SnapshotId, Timestamp, VerificationId,
    api::{Evidence, Verification},
};

use crate::{
    DbConnection, DbRow, Lease, Removal, Store, StoreError,
    reserve::OnFullDisk,
    row::{self, bigint, to_enum_name, to_json},
};

/// Verifications of a repository whose snapshots are kept.
const KEPT_CHECK_SNAPSHOTS: usize = 5;

impl Store {
    /// Records a verification before it begins, with the snapshot that it will leave.
    pub async fn verification_insert(
        &self,
        lease: Lease,
        new: &Verification,
        snapshot: &SnapshotId,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO verifications (id, repository, session, revision, pull_request, commit_id,
             base, status, snapshot, started_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        )
        .bind(new.id.to_string())
        .bind(new.repository.to_string())
        .bind(new.session.as_ref().map(ToString::to_string))
        .bind(new.revision.clone())
        .bind(new.pull_request.map(bigint))
        .bind(new.commit.clone())
        .bind(new.base.as_ref().map(ToString::to_string))
        .bind(to_enum_name(&new.status))
        .bind(snapshot.to_string())
        .bind(new.started_at.as_millis());
        self.writer.execute(Some(lease), query).await.map(drop)
    }

    /// Records how a verification goes on or has ended.
    pub async fn verification_update(
        &self,
        lease: Lease,
        now: &Verification,
    ) -> Result<(), StoreError> {
        let snapshot = now.evidence.as_ref().and_then(|evidence| evidence.snapshot_id.as_ref());
        let query = sqlx::query(
            "UPDATE verifications SET status = $2, evidence = $3, error = $4, unpublished = $5,
             ended_at = $6, snapshot = CASE WHEN CAST($6 AS BIGINT) IS NULL THEN snapshot ELSE $7
             END WHERE id = $1",
        )
        .bind(now.id.to_string())
        .bind(to_enum_name(&now.status))
        .bind(now.evidence.as_ref().map(to_json))
        .bind(now.error.clone())
        .bind(now.unpublished.clone())
        .bind(now.ended_at.map(Timestamp::as_millis))
        .bind(snapshot.map(ToString::to_string));
        let on_full_disk = match now.ended_at {
            Some(_) => OnFullDisk::UseReserve,
            None => OnFullDisk::Refuse,
        };
        self.writer.execute_on(on_full_disk, Some(lease), query).await.map(drop)
    }

    /// A verification of a repository.
    pub async fn verification_get(
        &self,
        repository: &RepositoryName,
        id: &VerificationId,
    ) -> Result<Verification, StoreError> {
        let query = sqlx::query("SELECT * FROM verifications WHERE repository = $1 AND id = $2")
            .bind(repository.to_string())
            .bind(id.to_string());
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("verification {id} of `{repository}`")))
    }

    /// The verifications of a repository that are kept, newest first.
    pub async fn verification_list(
        &self,
        repository: &RepositoryName,
    ) -> Result<Vec<Verification>, StoreError> {
        let query = sqlx::query(
            "SELECT * FROM verifications WHERE repository = $1 ORDER BY started_at DESC, id",
        )
        .bind(repository.to_string());
        self.all(query, read).await
    }

    /// Snapshots of verifications, also of those in progress.
    pub async fn verification_snapshots(&self) -> Result<Vec<SnapshotId>, StoreError> {
        let query = sqlx::query("SELECT snapshot FROM verifications WHERE snapshot IS NOT NULL");
        self.all(query, |row| row::parsed(row, "snapshot")).await
    }

    /// The snapshots of a repository's ended verifications, except for the newest ones.
    pub async fn verification_outdated(
        &self,
        repository: &RepositoryName,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        let query = sqlx::query(
            "SELECT snapshot FROM verifications WHERE repository = $1 AND snapshot IS NOT NULL
             AND ended_at IS NOT NULL ORDER BY started_at DESC, id",
        )
        .bind(repository.to_string());
        let all: Vec<SnapshotId> = self.all(query, |row| row::parsed(row, "snapshot")).await?;
        Ok(all.into_iter().skip(KEPT_CHECK_SNAPSHOTS).collect())
    }

    /// Forgets a snapshot that has been removed, and all but the newest hundred verifications
    /// without one.
    pub async fn verification_forget(
        &self,
        lease: Lease,
        repository: &RepositoryName,
        removed: Option<&SnapshotId>,
    ) -> Result<(), StoreError> {
        if let Some(snapshot) = removed {
            let query = sqlx::query("UPDATE verifications SET snapshot = NULL WHERE snapshot = $1")
                .bind(snapshot.to_string());
            self.writer.execute(Some(lease), query).await?;
        }
        let query = sqlx::query(
            "DELETE FROM verifications WHERE repository = $1 AND snapshot IS NULL
             AND ended_at IS NOT NULL AND id NOT IN
             (SELECT n.id FROM verifications n WHERE n.repository = $1
              ORDER BY n.started_at DESC, n.id LIMIT 100)",
        )
        .bind(repository.to_string());
        self.writer.execute(Some(lease), query).await.map(drop)
    }

    /// Ends the verifications that an earlier server has left.
    pub async fn verification_end_unfinished(
        &self,
        lease: Lease,
        error: &str,
        at: Timestamp,
    ) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "UPDATE verifications SET status = 'not_run', error = $1, ended_at = $2, snapshot = NULL
             WHERE ended_at IS NULL",
        )
        .bind(error.to_owned())
        .bind(at.as_millis());
        self.writer.execute(Some(lease), query).await
    }
}

/// The snapshots of a session's verifications.
pub(crate) async fn removals_of(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<Vec<Removal>, StoreError> {
    let rows = sqlx::query(
        "SELECT snapshot FROM verifications WHERE session = $1 AND snapshot IS NOT NULL",
    )
    .bind(session.to_string())
    .fetch_all(connection)
    .await?;
    row::readable(&rows, |row| Ok(Removal::Snapshot(row::parsed(row, "snapshot")?)))
}

fn read(row: &DbRow) -> Result<Verification, StoreError> {
    let kept: Option<SnapshotId> = row::parsed_optional(row, "snapshot")?;
    let evidence: Option<Evidence> = row::json_optional(row, "evidence")?;
    Ok(Verification {
        id: row::parsed(row, "id")?,
        repository: row::parsed(row, "repository")?,
        session: row::parsed_optional(row, "session")?,
        revision: row::text(row, "revision")?,
        pull_request: row::count_optional(row, "pull_request")?,
        commit: row::text(row, "commit_id")?,
        base: row::parsed_optional(row, "base")?,
        status: row::enum_name(row, "status")?,
        step: String::new(),
        evidence: evidence.map(|evidence| Evidence { snapshot_id: kept, ..evidence }),
        error: row::optional(row, "error")?,
        unpublished: row::optional(row, "unpublished")?,
        started_at: row::time(row, "started_at")?,
        ended_at: row::time_optional(row, "ended_at")?,
    })
}
