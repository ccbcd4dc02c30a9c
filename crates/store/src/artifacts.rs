//! Artifacts: which files a session's agents handed over. The content is in files, by its hash.

use harvest_proto::{SessionId, api::Artifact};

use crate::{
    DbConnection, DbRow, Removal, Store, StoreError,
    row::{self, bigint},
    target::Target,
};

impl Store {
    /// A session's artifacts, oldest first.
    pub async fn artifact_list(&self, session: &SessionId) -> Result<Vec<Artifact>, StoreError> {
        let sql = "SELECT * FROM artifacts WHERE session = $1 ORDER BY created_at, name";
        self.all(sqlx::query(sql).bind(session.to_string()), read).await
    }

    pub async fn artifact_get(
        &self,
        session: &SessionId,
        name: &str,
    ) -> Result<Artifact, StoreError> {
        let query = sqlx::query("SELECT * FROM artifacts WHERE session = $1 AND name = $2")
            .bind(session.to_string())
            .bind(name.to_owned());
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("artifact `{name}` in session {session}")))
    }

    /// Whether a session has an artifact with this content.
    pub async fn artifact_exists(&self, sha256: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("SELECT 1 FROM artifacts WHERE sha256 = $1 LIMIT 1");
        let found = query.bind(sha256.to_owned()).fetch_optional(&self.readers).await?;
        Ok(found.is_some())
    }
}

fn read(row: &DbRow) -> Result<Artifact, StoreError> {
    Ok(Artifact {
        name: row::text(row, "name")?,
        media_type: row::text(row, "media_type")?,
        bytes: row::count(row, "bytes")?,
        sha256: row::text(row, "sha256")?,
        created_at: row::time(row, "created_at")?,
    })
}

pub(crate) async fn insert(target: &mut Target<'_>, new: Artifact) -> Result<(), StoreError> {
    let what = format!("artifact `{}`", new.name);
    let sql = "INSERT INTO artifacts (session, name, media_type, bytes, sha256, created_at)
         VALUES ($1, $2, $3, $4, $5, $6)";
    let query = target.query(sql).bind(new.name).bind(new.media_type).bind(bigint(new.bytes));
    let query = query.bind(new.sha256).bind(new.created_at.as_millis());
    target.execute(query).await.map(drop).map_err(|error| StoreError::or_exists(error, what))
}

/// The contents that only this session has.
pub(crate) async fn removals_of(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<Vec<Removal>, StoreError> {
    let rows = sqlx::query(
        "SELECT DISTINCT a.sha256 FROM artifacts a WHERE a.session = $1 AND NOT EXISTS
         (SELECT 1 FROM artifacts o WHERE o.sha256 = a.sha256 AND o.session <> a.session)",
    )
    .bind(session.to_string())
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| Ok(Removal::Artifact(row::text(row, "sha256")?))).collect()
}
