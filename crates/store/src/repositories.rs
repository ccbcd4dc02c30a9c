//! Repositories people registered.

use harvest_proto::{SnapshotId, api::Repository};

use crate::{DbRow, Store, StoreError, builds, row};

impl Store {
    /// Registers a repository.
    ///
    /// # Errors
    /// [`StoreError::Exists`] when one has this name.
    pub async fn repository_insert(&self, repository: &Repository) -> Result<(), StoreError> {
        let new = repository.clone();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "INSERT INTO repositories (name, url, base, secret, image, created_at)
                         VALUES ($1, $2, $3, $4, $5, $6)",
                    )
                    .bind(new.name.clone())
                    .bind(new.url)
                    .bind(new.base)
                    .bind(new.secret)
                    .bind(new.image)
                    .bind(new.created_at.as_millis())
                    .execute(connection)
                    .await
                    .map_err(|error| StoreError::or_exists(error, format!("repository `{}`", new.name)))?;
                    Ok(().into())
                })
            })
            .await
    }

    /// A repository, with its newest good build.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] when there is none with this name.
    pub async fn repository_get(&self, name: &str) -> Result<Repository, StoreError> {
        let row = sqlx::query("SELECT * FROM repositories WHERE name = $1")
            .bind(name.to_owned())
            .fetch_optional(&self.readers)
            .await?
            .ok_or_else(|| StoreError::missing(format!("repository `{name}`")))?;
        self.repository_read(&row).await
    }

    /// All repositories, by name.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn repository_list(&self) -> Result<Vec<Repository>, StoreError> {
        let rows = sqlx::query("SELECT * FROM repositories ORDER BY name").fetch_all(&self.readers).await?;
        let mut all = Vec::with_capacity(rows.len());
        for row in &rows {
            all.push(self.repository_read(row).await?);
        }
        Ok(all)
    }

    /// Forgets a repository and its builds. Answers the builds' snapshots.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] when there is none; [`StoreError::Exists`] when a session uses it.
    pub async fn repository_delete(&self, name: &str) -> Result<Vec<SnapshotId>, StoreError> {
        let name = name.to_owned();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    let used = sqlx::query("SELECT COUNT(*) AS used FROM checkouts WHERE repository = $1")
                        .bind(name.clone())
                        .fetch_one(&mut *connection)
                        .await?;
                    if row::count::<u64>(&used, "used")? > 0 {
                        return Err(StoreError::Exists { what: format!("a session on repository `{name}`") });
                    }
                    let rows = sqlx::query("SELECT snapshot FROM builds WHERE repository = $1")
                        .bind(name.clone())
                        .fetch_all(&mut *connection)
                        .await?;
                    let snapshots =
                        rows.iter().map(|row| row::parsed(row, "snapshot")).collect::<Result<Vec<_>, _>>()?;
                    let gone = sqlx::query("DELETE FROM repositories WHERE name = $1")
                        .bind(name.clone())
                        .execute(&mut *connection)
                        .await?;
                    if gone.rows_affected() == 0 {
                        return Err(StoreError::missing(format!("repository `{name}`")));
                    }
                    Ok(snapshots.into())
                })
            })
            .await
    }

    async fn repository_read(&self, row: &DbRow) -> Result<Repository, StoreError> {
        let name = row::text(row, "name")?;
        Ok(Repository {
            build: builds::newest(&self.readers, &name).await?,
            name,
            url: row::text(row, "url")?,
            base: row::optional(row, "base")?,
            secret: row::optional(row, "secret")?,
            image: row::text(row, "image")?,
            created_at: row::time(row, "created_at")?,
        })
    }
}
