//! Builds of repositories. One at a time per repository, which the database itself sees to. A build
//! is named by the snapshot it will become; only a good one is ever shown or started from.

use harvest_proto::{SandboxId, SnapshotId, Timestamp, api::Build};

use crate::{
    DbPool, Store, StoreError, leases,
    leases::Lease,
    row::{self, bigint, to_json},
};

impl Store {
    /// A build begins, in this sandbox.
    ///
    /// # Errors
    /// [`StoreError::Exists`] when one of the repository is in progress.
    pub async fn build_begin(
        &self,
        lease: Lease,
        repository: &str,
        snapshot: &SnapshotId,
        sandbox: &SandboxId,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let repository = repository.to_owned();
        let (snapshot, sandbox) = (snapshot.to_string(), sandbox.to_string());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    sqlx::query(
                        "INSERT INTO builds (snapshot, repository, status, sandbox, started_at)
                         VALUES ($1, $2, 'building', $3, $4)",
                    )
                    .bind(snapshot)
                    .bind(repository)
                    .bind(sandbox)
                    .bind(at.as_millis())
                    .execute(connection)
                    .await
                    .map_err(|error| StoreError::or_exists(error, "a build in progress"))?;
                    Ok(().into())
                })
            })
            .await
    }

    /// A build is good, and from now on the newest.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] when it is not in progress.
    pub async fn build_publish(&self, lease: Lease, build: &Build) -> Result<(), StoreError> {
        let build = build.clone();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let changed = sqlx::query(
                        "UPDATE builds SET status = 'ready', sandbox = NULL, commit_id = $2, check_evidence = $3,
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
                        return Err(StoreError::missing(format!("build {} in progress", build.snapshot)));
                    }
                    Ok(().into())
                })
            })
            .await
    }

    /// A build failed; the one before it stays the newest.
    ///
    /// # Errors
    /// When the database cannot be written.
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
                        "UPDATE builds SET status = 'failed', sandbox = NULL, error = $2, built_at = $3
                         WHERE snapshot = $1 AND status = 'building'",
                    )
                    .bind(snapshot)
                    .bind(error)
                    .bind(at.as_millis())
                    .execute(connection)
                    .await?;
                    Ok(().into())
                })
            })
            .await
    }

    /// Good builds older than the last two. The last but one stays: a session may be about to start
    /// from it.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn build_outdated(&self, repository: &str) -> Result<Vec<SnapshotId>, StoreError> {
        let rows = sqlx::query(
            "SELECT snapshot FROM builds WHERE repository = $1 AND status = 'ready'
             ORDER BY built_at DESC, started_at DESC LIMIT 1000 OFFSET 2",
        )
        .bind(repository.to_owned())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(|row| row::parsed(row, "snapshot")).collect()
    }

    /// Forgets a build whose snapshot is gone.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
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
                    Ok(().into())
                })
            })
            .await
    }

    /// Builds in progress: after a restart, those nobody works on any more.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn build_unfinished(
        &self,
    ) -> Result<Vec<(SnapshotId, Option<SandboxId>)>, StoreError> {
        let rows = sqlx::query("SELECT snapshot, sandbox FROM builds WHERE status = 'building'")
            .fetch_all(&self.readers)
            .await?;
        rows.iter()
            .map(|row| Ok((row::parsed(row, "snapshot")?, row::parsed_optional(row, "sandbox")?)))
            .collect()
    }
}

pub(crate) async fn newest(
    readers: &DbPool,
    repository: &str,
) -> Result<Option<Build>, StoreError> {
    let row = sqlx::query(
        "SELECT * FROM builds WHERE repository = $1 AND status = 'ready'
         ORDER BY built_at DESC, started_at DESC LIMIT 1",
    )
    .bind(repository.to_owned())
    .fetch_optional(readers)
    .await?;
    row.map(|row| {
        Ok(Build {
            snapshot: row::parsed(&row, "snapshot")?,
            commit: row::text(&row, "commit_id")?,
            check: row::json_optional(&row, "check_evidence")?,
            millis: row::count(&row, "millis")?,
            built_at: row::time(&row, "built_at")?,
        })
    })
    .transpose()
}
