//! Builds of repositories, identified by the snapshot they produce. A unique index allows one build
//! at a time per repository. Sessions start from successful builds only.

use harvest_proto::{
    BranchName, RepositoryName, SnapshotId, Timestamp,
    api::{Build, BuildLog, BuildStatus, BuildSummary},
};

use crate::{
    DbRow, Lease, Store, StoreError,
    reserve::OnFullDisk,
    row::{self, bigint, to_json},
};

impl Store {
    /// Records the start of a build of the base or of another branch, of this commit if it is
    /// known. [`StoreError::Exists`] when the repository is being built already.
    pub async fn build_begin(
        &self,
        lease: Lease,
        (repository, branch): (&RepositoryName, Option<&BranchName>),
        snapshot: &SnapshotId,
        (provider, tip): (&str, Option<String>),
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO builds (snapshot, repository, status, provider, started_at, commit_id,
             branch) VALUES ($1, $2, 'building', $3, $4, $5, $6)",
        )
        .bind(snapshot.to_string())
        .bind(repository.to_string())
        .bind(provider.to_owned())
        .bind(at.as_millis())
        .bind(tip)
        .bind(branch_text(branch));
        let begun = self.writer.execute(Some(lease), query).await.map(drop);
        begun.map_err(|error| StoreError::or_exists(error, "a build of this repository"))
    }

    /// Marks a build as successful; it becomes the repository's newest.
    pub async fn build_publish(
        &self,
        lease: Lease,
        build: &Build,
        log: &str,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'ready', commit_id = $2, check_evidence = $3,
             millis = $4, built_at = $5, package_manager = $6, log = $7, config = $8,
             base_image = $9, base_image_id = $10, layers = $11
             WHERE snapshot = $1 AND status = 'building'",
        )
        .bind(build.snapshot_id.to_string())
        .bind(build.commit.clone())
        .bind(build.check.as_ref().map(to_json))
        .bind(bigint(build.millis))
        .bind(build.built_at.as_millis())
        .bind(build.package_manager.clone())
        .bind(log.to_owned())
        .bind(build.config.as_ref().map(to_json))
        .bind(build.image.clone())
        .bind(build.image_id.as_ref().map(ToString::to_string))
        .bind(i64::from(build.layers));
        match self.writer.execute(Some(lease), query).await? {
            0 => Err(StoreError::missing(format!("build {} in progress", build.snapshot_id))),
            _ => Ok(()),
        }
    }

    /// Marks a build as failed, also on a full disk; the previous build stays the newest.
    pub async fn build_fail(
        &self,
        lease: Lease,
        snapshot: &SnapshotId,
        (error, log): (&str, &str),
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'failed', error = $2, built_at = $3, log = $4
             WHERE snapshot = $1 AND status = 'building'",
        )
        .bind(snapshot.to_string())
        .bind(error.to_owned())
        .bind(at.as_millis())
        .bind(log.to_owned());
        self.writer.execute_on(OnFullDisk::UseReserve, Some(lease), query).await.map(drop)
    }

    /// The builds of a repository that are kept, newest first.
    pub async fn build_list(
        &self,
        repository: &RepositoryName,
    ) -> Result<Vec<BuildSummary>, StoreError> {
        let query = sqlx::query(
            "SELECT snapshot, status, branch, commit_id, package_manager, error, millis,
             started_at, built_at FROM builds WHERE repository = $1
             ORDER BY started_at DESC, snapshot",
        )
        .bind(repository.to_string());
        self.all(query, read_summary).await
    }

    /// A build of a repository with its log.
    pub async fn build_log(
        &self,
        repository: &RepositoryName,
        snapshot: &SnapshotId,
    ) -> Result<BuildLog, StoreError> {
        let query = sqlx::query(
            "SELECT snapshot, status, branch, commit_id, package_manager, error, millis,
             started_at, built_at, log FROM builds WHERE repository = $1 AND snapshot = $2",
        )
        .bind(repository.to_string())
        .bind(snapshot.to_string());
        let read =
            |row: &DbRow| Ok(BuildLog { build: read_summary(row)?, log: row::text(row, "log")? });
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("build {snapshot} of `{repository}`")))
    }

    /// Deletes failed builds of a repository, except for the newest twenty.
    pub async fn build_forget_failed(
        &self,
        lease: Lease,
        repository: &RepositoryName,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "DELETE FROM builds WHERE repository = $1 AND status = 'failed' AND snapshot NOT IN
             (SELECT n.snapshot FROM builds n WHERE n.repository = $1 AND n.status = 'failed'
              ORDER BY n.started_at DESC, n.snapshot LIMIT 20)",
        )
        .bind(repository.to_string());
        self.writer.execute(Some(lease), query).await.map(drop)
    }

    /// The newest successful build of a branch, or of the base.
    pub async fn build_newest(
        &self,
        repository: &RepositoryName,
        branch: Option<&BranchName>,
    ) -> Result<Option<Build>, StoreError> {
        let query = sqlx::query(
            "SELECT snapshot, provider, branch, commit_id, base_image, base_image_id, layers,
             package_manager, check_evidence, config, millis, built_at FROM builds
             WHERE repository = $1 AND branch = $2 AND status = 'ready'
             ORDER BY built_at DESC, started_at DESC LIMIT 1",
        )
        .bind(repository.to_string())
        .bind(branch_text(branch));
        Ok(self.optional(query, read).await?.flatten())
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

fn read_summary(row: &DbRow) -> Result<BuildSummary, StoreError> {
    let status: BuildStatus = row::parsed(row, "status")?;
    let ended_at = row::time_optional(row, "built_at")?;
    Ok(BuildSummary {
        snapshot_id: row::parsed(row, "snapshot")?,
        status,
        commit: row::optional(row, "commit_id")?,
        branch: read_branch(row)?,
        package_manager: row::optional(row, "package_manager")?,
        error: row::optional(row, "error")?,
        millis: match status {
            BuildStatus::Ready => Some(row::count(row, "millis")?),
            BuildStatus::Building | BuildStatus::Failed => None,
        },
        started_at: row::time(row, "started_at")?,
        ended_at,
    })
}

/// The build in a row of `repositories.rs`, if the repository has one.
pub(crate) fn read(row: &DbRow) -> Result<Option<Build>, StoreError> {
    let Some(snapshot) = row::parsed_optional(row, "snapshot")? else { return Ok(None) };
    Ok(Some(Build {
        snapshot_id: snapshot,
        provider: row::text(row, "provider")?,
        commit: row::text(row, "commit_id")?,
        branch: read_branch(row)?,
        image: row::text(row, "base_image")?,
        image_id: row::parsed_optional(row, "base_image_id")?,
        layers: row::count(row, "layers")?,
        package_manager: row::optional(row, "package_manager")?,
        check: row::json_optional(row, "check_evidence")?,
        config: row::json_optional(row, "config")?,
        millis: row::count(row, "millis")?,
        built_at: row::time(row, "built_at")?,
    }))
}

/// The base is the empty text, which is no name of a branch.
fn branch_text(branch: Option<&BranchName>) -> String {
    branch.map(ToString::to_string).unwrap_or_default()
}

fn read_branch(row: &DbRow) -> Result<Option<BranchName>, StoreError> {
    match row::text(row, "branch")?.as_str() {
        "" => Ok(None),
        _ => row::parsed(row, "branch").map(Some),
    }
}
