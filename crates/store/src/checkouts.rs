//! The repositories a session works on, in their order, with what became of each: where its work
//! started, what passed the git door, what was looked at since.

use std::collections::HashMap;

use harvest_proto::{
    SessionId,
    api::{Pull, SessionRepository},
};
use sqlx::AssertSqlSafe;

use crate::{
    DbConnection, DbPool, DbRow, StoreError, commit::Target, row, sessions::SessionRecord,
};

/// A repository a session is to work on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCheckout {
    /// The repository's name.
    pub repository: String,
    /// The branch work starts from; the remote's default when absent.
    pub base: Option<String>,
    /// The commit the work is compared with, when it is known already.
    pub base_commit: Option<String>,
}

/// A repository a session works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckoutRecord {
    /// The repository's name.
    pub repository: String,
    /// The branch work starts from; the remote's default when absent.
    pub base: Option<String>,
    /// The commit the work is compared with, once known.
    pub base_commit: Option<String>,
    /// The newest commit that passed the git door.
    pub pushed_commit: Option<String>,
    /// The newest commit whose pull request and evidence are done.
    pub reviewed_commit: Option<String>,
}

impl CheckoutRecord {
    /// The commit that passed the door and was not looked at since.
    #[must_use]
    pub fn unreviewed(&self) -> Option<&str> {
        self.pushed_commit
            .as_deref()
            .filter(|pushed| self.reviewed_commit.as_deref() != Some(pushed))
    }
}

impl SessionRecord {
    /// The names of the repositories it works on, the primary one first.
    #[must_use]
    pub fn repositories(&self) -> Vec<String> {
        self.checkouts.iter().map(|checkout| checkout.repository.clone()).collect()
    }

    /// The commit the work in a repository is compared with, once known.
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

/// What a write about one repository changes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fact {
    DefaultBase,
    BaseCommit,
    Pushed,
    Reviewed,
}

pub(crate) async fn learn(
    target: &mut Target<'_>,
    fact: Fact,
    repository: String,
    text: String,
) -> Result<(), StoreError> {
    let sql = match fact {
        Fact::DefaultBase => {
            "UPDATE checkouts SET base = COALESCE(base, $3) WHERE session = $1 AND repository = $2"
        }
        Fact::BaseCommit => {
            "UPDATE checkouts SET base_commit = $3 WHERE session = $1 AND repository = $2"
        }
        Fact::Pushed => {
            "UPDATE checkouts SET pushed_commit = $3 WHERE session = $1 AND repository = $2"
        }
        Fact::Reviewed => {
            "UPDATE checkouts SET reviewed_commit = $3 WHERE session = $1 AND repository = $2"
        }
    };
    sqlx::query(sql)
        .bind(target.session.to_string())
        .bind(repository)
        .bind(text)
        .execute(&mut *target.connection)
        .await?;
    Ok(())
}

/// Adds to each session what it works on.
pub(crate) async fn complete(
    readers: &DbPool,
    records: &mut [SessionRecord],
) -> Result<(), StoreError> {
    if records.is_empty() {
        return Ok(());
    }
    let marks: Vec<String> = (1..=records.len()).map(|number| format!("${number}")).collect();
    // A repository is never forgotten while a session uses it.
    let sql = format!(
        "SELECT c.session, c.repository, c.base, c.base_commit, c.pushed_commit, c.reviewed_commit, r.url, l.pull
         FROM checkouts c LEFT JOIN repositories r ON r.name = c.repository
         LEFT JOIN pulls l ON l.session = c.session AND l.repository = c.repository
         WHERE c.session IN ({}) ORDER BY c.session, c.place",
        marks.join(", ")
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
        pull: row::json_optional::<Pull>(row, "pull")?,
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
