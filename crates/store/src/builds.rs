//! Builds of repositories, identified by the snapshot they produce. A unique index allows one build
//! at a time per repository. Only a successful build is shown or used.

use harvest_proto::{RepositoryName, SnapshotId, Timestamp, api::Build};

use crate::{
    DbRow, Lease, Store, StoreError,
    row::{self, bigint, to_json},
};

impl Store {
    /// Records the start of a build. [`StoreError::Exists`] when the repository is being built
    /// already.
    pub async fn build_begin(
        &self,
        lease: Lease,
        repository: &RepositoryName,
        snapshot: &SnapshotId,
        provider: &str,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO builds (snapshot, repository, status, provider, started_at)
             VALUES ($1, $2, 'building', $3, $4)",
        )
        .bind(snapshot.to_string())
        .bind(repository.to_string())
        .bind(provider.to_owned())
        .bind(at.as_millis());
        let begun = self.writer.execute(Some(lease), query).await.map(drop);
        begun.map_err(|error| StoreError::or_exists(error, "a build of this repository"))
    }

    /// Marks a build as successful; it becomes the repository's newest.
    pub async fn build_publish(&self, lease: Lease, build: &Build) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'ready', commit_id = $2, check_evidence = $3,
             millis = $4, built_at = $5 WHERE snapshot = $1 AND status = 'building'",
        )
        .bind(build.snapshot_id.to_string())
        .bind(build.commit.clone())
        .bind(build.check.as_ref().map(to_json))
        .bind(bigint(build.millis))
        .bind(build.built_at.as_millis());
        match self.writer.execute(Some(lease), query).await? {
            0 => Err(StoreError::missing(format!("build {} in progress", build.snapshot_id))),
            _ => Ok(()),
        }
    }

    /// Marks a build as failed; the previous build stays the newest.
    pub async fn build_fail(
        &self,
        lease: Lease,
        snapshot: &SnapshotId,
        error: &str,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'failed', error = $2, built_at = $3
             WHERE snapshot = $1 AND status = 'building'",
        )
        .bind(snapshot.to_string())
        .bind(error.to_owned())
        .bind(at.as_millis());
        self.writer.execute(Some(lease), query).await.map(drop)
    }

    /// Successful builds older than the last two. The second newest is kept because a session may
    /// be about to start from it.
    pub async fn build_outdated(
        &self,
        repository: &RepositoryName,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        let query = sqlx::query(
            "SELECT snapshot FROM builds WHERE repository = $1 AND status = 'ready'
             ORDER BY built_at DESC, started_at DESC LIMIT 1000 OFFSET 2",
        )
        .bind(repository.to_string());
        self.all(query, |row| row::parsed(row, "snapshot")).await
    }

    /// Deletes a build whose snapshot has been removed.
    pub async fn build_forget(
        &self,
        lease: Lease,
        snapshot: &SnapshotId,
    ) -> Result<(), StoreError> {
        let query =
            sqlx::query("DELETE FROM builds WHERE snapshot = $1").bind(snapshot.to_string());
        self.writer.execute(Some(lease), query).await.map(drop)
    }

    /// Builds in progress; after a restart these are orphaned.
    pub async fn build_unfinished(&self) -> Result<Vec<SnapshotId>, StoreError> {
        let query = sqlx::query("SELECT snapshot FROM builds WHERE status = 'building'");
        self.all(query, |row| row::parsed(row, "snapshot")).await
    }
}

/// The build in a row of `repositories.rs`, if the repository has one.
pub(crate) fn read(row: &DbRow) -> Result<Option<Build>, StoreError> {
    let Some(snapshot) = row::parsed_optional(row, "snapshot")? else { return Ok(None) };
    Ok(Some(Build {
        snapshot_id: snapshot,
        provider: row::text(row, "provider")?,
        commit: row::text(row, "commit_id")?,
        check: row::json_optional(row, "check_evidence")?,
        millis: row::count(row, "millis")?,
        built_at: row::time(row, "built_at")?,
    }))
}
