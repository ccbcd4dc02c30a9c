//! Builds of repositories, identified by the snapshot they produce. A unique index allows one build
//! at a time per repository. Only a successful build is shown or used.

use harvest_proto::{RepositoryName, SnapshotId, Timestamp, api::Build};

use crate::{
    DbRow, Store, StoreError, leases,
    leases::Lease,
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
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let (repository, snapshot) = (repository.to_string(), snapshot.to_string());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    sqlx::query(
                        "INSERT INTO builds (snapshot, repository, status, started_at)
                         VALUES ($1, $2, 'building', $3)",
                    )
                    .bind(snapshot)
                    .bind(repository)
                    .bind(at.as_millis())
                    .execute(connection)
                    .await
                    .map_err(|error| StoreError::or_exists(error, "a build of this repository"))?;
                    Ok(())
                })
            })
            .await
    }

    /// Marks a build as successful; it becomes the repository's newest.
    pub async fn build_publish(&self, lease: Lease, build: &Build) -> Result<(), StoreError> {
        let build = build.clone();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let changed = sqlx::query(
                        "UPDATE builds SET status = 'ready', commit_id = $2, check_evidence = $3,
                         millis = $4, built_at = $5 WHERE snapshot = $1 AND status = 'building'",
                    )
                    .bind(build.snapshot.to_string())
                    .bind(build.commit)
                    .bind(build.check.as_ref().map(to_json))
                    .bind(bigint(build.millis))
                    .bind(build.built_at.as_millis())
                    .execute(connection)
                    .await?;
                    if changed.rows_affected() == 0 {
                        return Err(StoreError::missing(format!(
                            "build {} in progress",
                            build.snapshot
                        )));
                    }
                    Ok(())
                })
            })
            .await
    }

    /// Marks a build as failed; the previous build stays the newest.
    pub async fn build_fail(
        &self,
        lease: Lease,
        snapshot: &SnapshotId,
        error: &str,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let (snapshot, error) = (snapshot.to_string(), error.to_owned());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    sqlx::query(
                        "UPDATE builds SET status = 'failed', error = $2, built_at = $3
                         WHERE snapshot = $1 AND status = 'building'",
                    )
                    .bind(snapshot)
                    .bind(error)
                    .bind(at.as_millis())
                    .execute(connection)
                    .await?;
                    Ok(())
                })
            })
            .await
    }

    /// Successful builds older than the last two. The second newest is kept because a session may
    /// be about to start from it.
    pub async fn build_outdated(
        &self,
        repository: &RepositoryName,
    ) -> Result<Vec<SnapshotId>, StoreError> {
        let rows = sqlx::query(
            "SELECT snapshot FROM builds WHERE repository = $1 AND status = 'ready'
             ORDER BY built_at DESC, started_at DESC LIMIT 1000 OFFSET 2",
        )
        .bind(repository.to_string())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(|row| row::parsed(row, "snapshot")).collect()
    }

    /// Deletes a build whose snapshot has been removed.
    pub async fn build_forget(
        &self,
        lease: Lease,
        snapshot: &SnapshotId,
    ) -> Result<(), StoreError> {
        let snapshot = snapshot.to_string();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    sqlx::query("DELETE FROM builds WHERE snapshot = $1")
                        .bind(snapshot)
                        .execute(connection)
                        .await?;
                    Ok(())
                })
            })
            .await
    }

    /// Builds in progress; after a restart these are orphaned.
    pub async fn build_unfinished(&self) -> Result<Vec<SnapshotId>, StoreError> {
        let rows = sqlx::query("SELECT snapshot FROM builds WHERE status = 'building'")
            .fetch_all(&self.readers)
            .await?;
        rows.iter().map(|row| row::parsed(row, "snapshot")).collect()
    }
}

/// The build in a row of `repositories.rs`, if the repository has one.
pub(crate) fn read(row: &DbRow) -> Result<Option<Build>, StoreError> {
    let Some(snapshot) = row::parsed_optional(row, "snapshot")? else { return Ok(None) };
    Ok(Some(Build {
        snapshot,
        commit: row::text(row, "commit_id")?,
        check: row::json_optional(row, "check_evidence")?,
        millis: row::count(row, "millis")?,
        built_at: row::time(row, "built_at")?,
    }))
}
