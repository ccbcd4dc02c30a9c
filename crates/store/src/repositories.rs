//! Registered repositories.

use harvest_proto::{RepositoryName, SessionId, Timestamp, api::Repository};

use crate::{DbRow, Removal, Store, StoreError, builds, removals, reserve::OnFullDisk, row};

// With the newest successful build of each one's base.
const SELECT: &str = "SELECT r.name, r.url, r.base, r.secret, r.image, r.created_at, \
     b.snapshot, b.provider, b.branch, b.commit_id, b.base_image, b.base_image_id, b.layers, \
     b.package_manager, b.check_evidence, b.config, b.millis, b.built_at \
     FROM repositories r LEFT JOIN builds b ON b.snapshot = \
     (SELECT n.snapshot FROM builds n \
     WHERE n.repository = r.name AND n.branch = '' AND n.status = 'ready' \
     ORDER BY n.built_at DESC, n.started_at DESC LIMIT 1) ";

impl Store {
    pub async fn repository_insert(&self, repository: &Repository) -> Result<(), StoreError> {
        let new = repository.clone();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "INSERT INTO repositories (name, url, base, secret, image, created_at)
                         VALUES ($1, $2, $3, $4, $5, $6)",
                    )
                    .bind(new.name.to_string())
                    .bind(new.url)
                    .bind(new.base.map(String::from))
                    .bind(new.secret)
                    .bind(new.image)
                    .bind(new.created_at.as_millis())
                    .execute(&mut *connection)
                    .await
                    .map_err(|error| {
                        StoreError::or_exists(error, format!("repository `{}`", new.name))
                    })?;
                    // A deleted repository of the same name may have a pending removal of its state
                    // folder.
                    removals::delete(&Removal::State(new.name)).execute(connection).await?;
                    Ok(())
                })
            })
            .await
    }

    /// Replaces the base, secret and image of a repository.
    pub async fn repository_update(&self, repository: &Repository) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE repositories SET base = $2, secret = $3, image = $4 WHERE name = $1",
        )
        .bind(repository.name.to_string())
        .bind(repository.base.clone().map(String::from))
        .bind(repository.secret.clone())
        .bind(repository.image.clone());
        match self.writer.execute(None, query).await? {
            0 => Err(StoreError::missing(format!("repository `{}`", repository.name))),
            _ => Ok(()),
        }
    }

    /// A repository with its newest successful build.
    pub async fn repository_get(&self, name: &RepositoryName) -> Result<Repository, StoreError> {
        let query = sqlx::query(sqlx::AssertSqlSafe(format!("{SELECT} WHERE r.name = $1")))
            .bind(name.to_string());
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("repository `{name}`")))
    }

    /// All repositories, by name.
    pub async fn repository_list(&self) -> Result<Vec<Repository>, StoreError> {
        let query = sqlx::query(sqlx::AssertSqlSafe(format!("{SELECT} ORDER BY r.name")));
        self.all(query, read).await
    }

    /// URL and secret of every repository. Fails when one cannot be read: its copy is in use.
    pub async fn repository_remotes(&self) -> Result<Vec<(String, Option<String>)>, StoreError> {
        let rows = sqlx::query("SELECT url, secret FROM repositories").fetch_all(&self.readers);
        let read = |row: &DbRow| Ok((row::text(row, "url")?, row::optional(row, "secret")?));
        rows.await?.iter().map(read).collect()
    }

    /// The repositories of a session, the primary one first.
    pub async fn repository_list_of(
        &self,
        session: &SessionId,
    ) -> Result<Vec<Repository>, StoreError> {
        let query = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} JOIN checkouts c ON c.repository = r.name WHERE c.session = $1 ORDER BY c.position"
        )))
        .bind(session.to_string());
        self.all(query, read).await
    }

    /// The names of all repositories, sorted.
    pub async fn repository_names(&self) -> Result<Vec<RepositoryName>, StoreError> {
        let query = sqlx::query("SELECT name FROM repositories ORDER BY name");
        self.all(query, |row| row::parsed(row, "name")).await
    }

    /// Deletes a repository and its builds. Returns the pending removals. [`StoreError::InUse`]
    /// when a session uses it.
    pub async fn repository_delete(
        &self,
        name: &RepositoryName,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        let name = name.clone();
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    let used = sqlx::query(
                        "SELECT COUNT(*) AS sessions FROM checkouts WHERE repository = $1",
                    )
                    .bind(name.to_string())
                    .fetch_one(&mut *connection)
                    .await?;
                    let sessions = row::count(&used, "sessions")?;
                    if sessions > 0 {
                        return Err(StoreError::InUse {
                            what: format!("repository `{name}`"),
                            sessions,
                        });
                    }
                    let rows = sqlx::query(
                        "SELECT snapshot FROM builds WHERE repository = $1 UNION SELECT snapshot
                         FROM verifications WHERE repository = $1 AND snapshot IS NOT NULL",
                    )
                    .bind(name.to_string())
                    .fetch_all(&mut *connection)
                    .await?;
                    let mut removals: Vec<Removal> = row::readable(&rows, |row| {
                        Ok(Removal::Snapshot(row::parsed(row, "snapshot")?))
                    })?;
                    removals.push(Removal::State(name.clone()));
                    let known = sqlx::query("SELECT url, secret FROM repositories WHERE name = $1")
                        .bind(name.to_string())
                        .fetch_optional(&mut *connection)
                        .await?;
                    if let Some(known) = known {
                        let (url, secret) =
                            (row::text(&known, "url")?, row::optional(&known, "secret")?);
                        removals.push(Removal::ForgeCopy { url, secret });
                    }
                    for removal in &removals {
                        removals::insert(connection, removal, at).await?;
                    }
                    let gone = sqlx::query("DELETE FROM repositories WHERE name = $1")
                        .bind(name.to_string())
                        .execute(&mut *connection)
                        .await?;
                    if gone.rows_affected() == 0 {
                        return Err(StoreError::missing(format!("repository `{name}`")));
                    }
                    Ok(removals)
                })
            })
            .await
    }
}

fn read(row: &DbRow) -> Result<Repository, StoreError> {
    Ok(Repository {
        name: row::parsed(row, "name")?,
        url: row::text(row, "url")?,
        base: row::parsed_optional(row, "base")?,
        secret: row::optional(row, "secret")?,
        image: row::optional(row, "image")?,
        build: builds::read(row)?,
        created_at: row::time(row, "created_at")?,
    })
}
