//! The commits that sessions pushed to their branches. A session may replace them there, and no
//! others. A row is written before its push is sent: a server that is killed before the remote
//! answers does not forget the commit. Of the pushes without an answer, only the newest counts, and
//! the one whose commit it expects at the remote: a session that breaks its pushes off claims no
//! list of commits.

use harvest_proto::{RepositoryName, SessionId};

use crate::{Store, StoreError, row, target::Target};

impl Store {
    /// Whether a session pushed this commit, or has begun to. One whose push had no answer is its
    /// own until it was replaced once.
    pub async fn has_pushed(
        &self,
        session: &SessionId,
        repository: &RepositoryName,
        commit: &str,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "SELECT COUNT(*) AS found FROM pushed_commits
             WHERE session = $1 AND repository = $2 AND commit_id = $3
             AND (accepted = 1 OR replaced = 0)",
        )
        .bind(session.to_string())
        .bind(repository.to_string())
        .bind(commit.to_owned());
        Ok(self.optional(query, |row| row::count(row, "found")).await?.unwrap_or(0) > 0)
    }

    /// How many commits a session replaced on its branch.
    pub async fn replaced_commits(
        &self,
        session: &SessionId,
        repository: &RepositoryName,
    ) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "SELECT COUNT(*) AS found FROM pushed_commits
             WHERE session = $1 AND repository = $2 AND replaced = 1",
        )
        .bind(session.to_string())
        .bind(repository.to_string());
        Ok(self.optional(query, |row| row::count(row, "found")).await?.unwrap_or(0))
    }
}

pub(crate) async fn begin(
    target: &mut Target<'_>,
    repository: &RepositoryName,
    (old, new): (String, String),
    replaces: bool,
) -> Result<(), StoreError> {
    if replaces {
        let sql = "UPDATE pushed_commits SET replaced = 1
                   WHERE session = $1 AND repository = $2 AND commit_id = $3";
        let query = target.query(sql).bind(repository.to_string()).bind(old.clone());
        target.execute(query).await?;
    }
    let sql = "DELETE FROM pushed_commits WHERE session = $1 AND repository = $2
               AND commit_id <> $3 AND accepted = 0 AND replaced = 0";
    let query = target.query(sql).bind(repository.to_string()).bind(old);
    target.execute(query).await?;
    let sql = "INSERT INTO pushed_commits (session, repository, commit_id, accepted, replaced)
               VALUES ($1, $2, $3, 0, 0) ON CONFLICT (session, repository, commit_id) DO NOTHING";
    let query = target.query(sql).bind(repository.to_string()).bind(new);
    target.execute(query).await.map(drop)
}

pub(crate) async fn accept(
    target: &mut Target<'_>,
    repository: &RepositoryName,
    commit: String,
) -> Result<(), StoreError> {
    let sql = "INSERT INTO pushed_commits (session, repository, commit_id, accepted, replaced)
               VALUES ($1, $2, $3, 1, 0) ON CONFLICT (session, repository, commit_id)
               DO UPDATE SET accepted = 1";
    let query = target.query(sql).bind(repository.to_string()).bind(commit);
    target.execute(query).await.map(drop)
}

/// Forgets a push that the remote refused, unless an earlier one of the same commit was accepted.
pub(crate) async fn refuse(
    target: &mut Target<'_>,
    repository: &RepositoryName,
    commit: String,
) -> Result<(), StoreError> {
    let sql = "DELETE FROM pushed_commits
               WHERE session = $1 AND repository = $2 AND commit_id = $3 AND accepted = 0";
    let query = target.query(sql).bind(repository.to_string()).bind(commit);
    target.execute(query).await.map(drop)
}
