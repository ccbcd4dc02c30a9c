//! Checkouts: the repositories of a session in order, with their base, pushed and reviewed commits.

use std::collections::HashMap;

use harvest_proto::{
    SessionId,
    api::{PullRequest, SessionRepository},
};
use sqlx::AssertSqlSafe;

use crate::{
    DbConnection, DbPool, DbRow, StoreError, batch::placeholders, commit::Target, row,
    sessions::SessionRecord,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCheckout {
    pub repository: String,
    /// Branch to start from; the remote's default branch when absent.
    pub base: Option<String>,
    /// Base commit of the session's diff, if known.
    pub base_commit: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckoutRecord {
    pub repository: String,
    /// Branch the session started from; the remote's default branch when absent.
    pub base: Option<String>,
    /// Base commit of the session's diff, once known.
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

impl SessionRecord {
    /// Names of the session's repositories, the primary one first.
    #[must_use]
    pub fn repositories(&self) -> Vec<String> {
        self.checkouts.iter().map(|checkout| checkout.repository.clone()).collect()
    }

    /// Base commit of the session's diff in a repository, once known.
    #[must_use]
    pub fn base_commit(&self, repository: &str) -> Option<&str> {
        self.checkouts
            .iter()
            .find(|checkout| checkout.repository == repository)?
            .base_commit
            .as_deref()
    }
}

pub(crate) async fn insert(
    connection: &mut DbConnection,
    session: &SessionId,
    checkouts: Vec<NewCheckout>,
) -> Result<(), StoreError> {
    for (place, new) in (0i64..).zip(checkouts) {
        sqlx::query(
            "INSERT INTO checkouts (session, place, repository, base, base_commit)
             VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(session.to_string())
        .bind(place)
        .bind(new.repository.clone())
        .bind(new.base)
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
    repository: String,
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
    sqlx::query(sql)
        .bind(target.session.to_string())
        .bind(repository)
        .bind(value)
        .execute(&mut *target.connection)
        .await?;
    Ok(())
}

/// Loads the checkouts and pull requests of sessions.
pub(crate) async fn load_into(
    readers: &DbPool,
    records: &mut [SessionRecord],
) -> Result<(), StoreError> {
    if records.is_empty() {
        return Ok(());
    }
    let ids = placeholders(1, records.len());
    // A repository cannot be deleted while a session uses it.
    let sql = format!(
        "SELECT c.session, c.repository, c.base, c.base_commit, c.pushed_commit, c.reviewed_commit, r.url, l.pull
         FROM checkouts c LEFT JOIN repositories r ON r.name = c.repository
         LEFT JOIN pulls l ON l.session = c.session AND l.repository = c.repository
         WHERE c.session IN ({ids}) ORDER BY c.session, c.place"
    );
    let mut query = sqlx::query(AssertSqlSafe(sql));
    for record in records.iter() {
        query = query.bind(record.session.id.to_string());
    }
    let mut found: HashMap<SessionId, Vec<DbRow>> = HashMap::new();
    for row in query.fetch_all(readers).await? {
        found.entry(row::parsed(&row, "session")?).or_default().push(row);
    }
    for record in records {
        for row in found.remove(&record.session.id).unwrap_or_default() {
            add(record, &row)?;
        }
        let session = &mut record.session;
        session.pull = session.repositories.iter().find_map(|shown| shown.pull.clone());
        session.pr_number = session.pull.as_ref().map(|pull| pull.number);
        session.pr_url = session.pull.as_ref().map(|pull| pull.url.clone());
    }
    Ok(())
}

fn add(record: &mut SessionRecord, row: &DbRow) -> Result<(), StoreError> {
    let repository = row::text(row, "repository")?;
    let base = row::optional(row, "base")?;
    record.session.repositories.push(SessionRepository {
        name: repository.clone(),
        url: row::optional(row, "url")?.unwrap_or_default(),
        base: base.clone(),
        branch: record.session.branch.clone(),
        pull: row::json_optional::<PullRequest>(row, "pull")?,
    });
    record.checkouts.push(CheckoutRecord {
        repository,
        base,
        base_commit: row::optional(row, "base_commit")?,
        pushed_commit: row::optional(row, "pushed_commit")?,
        reviewed_commit: row::optional(row, "reviewed_commit")?,
    });
    Ok(())
}
