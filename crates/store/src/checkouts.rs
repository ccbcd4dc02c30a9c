//! Checkouts: the repositories of a session in order, with their base, pushed and reviewed commits.

use std::collections::HashMap;

use harvest_proto::{
    BranchName, CheckoutFolder, RepositoryName, SessionId, api::PullRequest,
    repository_name::checkout_folders,
};
use sqlx::AssertSqlSafe;

use crate::{DbConnection, DbPool, DbRow, StoreError, batch::placeholders, row, target::Target};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCheckout {
    pub repository: RepositoryName,
    /// Branch to start from; the remote's default branch when absent.
    pub base: Option<BranchName>,
    /// Where the session's diff begins, if known: a commit, or the tree that setup left.
    pub base_commit: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckoutRecord {
    pub repository: RepositoryName,
    pub folder: CheckoutFolder,
    /// Branch the session started from; the remote's default branch when absent.
    pub base: Option<BranchName>,
    /// Where the session's diff begins, once known: a commit, or the tree that setup left.
    pub base_commit: Option<String>,
    /// Newest commit pushed through the git door.
    pub pushed_commit: Option<String>,
    /// Newest commit with pull request and evidence.
    pub reviewed_commit: Option<String>,
}

impl CheckoutRecord {
    /// The pushed commit, if it has not been reviewed yet.
    #[must_use]
    pub fn unreviewed(&self) -> Option<&str> {
        self.pushed_commit
            .as_deref()
            .filter(|pushed| self.reviewed_commit.as_deref() != Some(pushed))
    }
}

pub(crate) async fn insert(
    connection: &mut DbConnection,
    session: &SessionId,
    checkouts: Vec<NewCheckout>,
) -> Result<(), StoreError> {
    let folders = checkout_folders(checkouts.iter().map(|new| &new.repository));
    for (position, (new, folder)) in (0i64..).zip(checkouts.into_iter().zip(folders)) {
        sqlx::query(
            "INSERT INTO checkouts (session, position, repository, folder, base, base_commit)
             VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(session.to_string())
        .bind(position)
        .bind(new.repository.to_string())
        .bind(String::from(folder))
        .bind(new.base.map(String::from))
        .bind(new.base_commit)
        .execute(&mut *connection)
        .await
        .map_err(|error| {
            StoreError::or_exists(error, format!("a checkout of `{}`", new.repository))
        })?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum CheckoutColumn {
    DefaultBase,
    BaseCommit,
    Pushed,
    Reviewed,
}

pub(crate) async fn update(
    target: &mut Target<'_>,
    column: CheckoutColumn,
    repository: RepositoryName,
    value: String,
) -> Result<(), StoreError> {
    let sql = match column {
        CheckoutColumn::DefaultBase => {
            "UPDATE checkouts SET base = COALESCE(base, $3) WHERE session = $1 AND repository = $2"
        }
        CheckoutColumn::BaseCommit => {
            "UPDATE checkouts SET base_commit = $3 WHERE session = $1 AND repository = $2"
        }
        CheckoutColumn::Pushed => {
            "UPDATE checkouts SET pushed_commit = $3 WHERE session = $1 AND repository = $2"
        }
        CheckoutColumn::Reviewed => {
            "UPDATE checkouts SET reviewed_commit = $3 WHERE session = $1 AND repository = $2"
        }
    };
    let query = target.query(sql).bind(String::from(repository)).bind(value);
    target.execute(query).await.map(drop)
}

/// A checkout with its repository's URL and pull request.
pub(crate) struct LoadedCheckout {
    pub(crate) record: CheckoutRecord,
    pub(crate) url: String,
    pub(crate) pull_request: Option<PullRequest>,
}

/// Loads the checkouts of sessions, the primary one first.
pub(crate) async fn load(
    readers: &DbPool,
    sessions: &[SessionId],
) -> Result<HashMap<SessionId, Vec<LoadedCheckout>>, StoreError> {
    let mut loaded: HashMap<SessionId, Vec<LoadedCheckout>> = HashMap::new();
    if sessions.is_empty() {
        return Ok(loaded);
    }
    let ids = placeholders(1, sessions.len());
    // A repository cannot be deleted while a session uses it.
    let sql = format!(
        "SELECT c.session, c.repository, c.folder, c.base, c.base_commit, c.pushed_commit, c.reviewed_commit, r.url,
         p.pull_request FROM checkouts c LEFT JOIN repositories r ON r.name = c.repository
         LEFT JOIN pull_requests p ON p.session = c.session AND p.repository = c.repository
         WHERE c.session IN ({ids}) ORDER BY c.session, c.position"
    );
    let mut query = sqlx::query(AssertSqlSafe(sql));
    for session in sessions {
        query = query.bind(session.to_string());
    }
    let read = |row: &DbRow| Ok((row::parsed(row, "session")?, read(row)?));
    let rows: Vec<(SessionId, LoadedCheckout)> =
        row::readable(&query.fetch_all(readers).await?, read)?;
    for (session, checkout) in rows {
        loaded.entry(session).or_default().push(checkout);
    }
    Ok(loaded)
}

fn read(row: &DbRow) -> Result<LoadedCheckout, StoreError> {
    Ok(LoadedCheckout {
        record: CheckoutRecord {
            repository: row::parsed(row, "repository")?,
            folder: row::parsed(row, "folder")?,
            base: row::parsed_optional(row, "base")?,
            base_commit: row::optional(row, "base_commit")?,
            pushed_commit: row::optional(row, "pushed_commit")?,
            reviewed_commit: row::optional(row, "reviewed_commit")?,
        },
        url: row::optional(row, "url")?.unwrap_or_default(),
        pull_request: row::json_optional(row, "pull_request")?,
    })
}
