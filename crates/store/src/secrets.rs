//! Secrets, encrypted by the vault; the store never sees a plain value.

use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::Timestamp;

use crate::{Store, StoreError, row};

impl Store {
    /// Stores an encrypted secret; replaces an existing one.
    pub async fn secret_set(
        &self,
        name: &str,
        sealed: &[u8],
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let (name, sealed) = (name.to_owned(), BASE64_STANDARD.encode(sealed));
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "INSERT INTO secrets (name, sealed, updated_at) VALUES ($1, $2, $3)
                         ON CONFLICT (name) DO UPDATE SET sealed = excluded.sealed, updated_at = excluded.updated_at",
                    )
                    .bind(name)
                    .bind(sealed)
                    .bind(at.as_millis())
                    .execute(connection)
                    .await?;
                    Ok(())
                })
            })
            .await
    }

    /// The encrypted secret.
    pub async fn secret_get(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let row = sqlx::query("SELECT sealed FROM secrets WHERE name = $1")
            .bind(name.to_owned())
            .fetch_optional(&self.readers)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let sealed = BASE64_STANDARD
            .decode(row::text(&row, "sealed")?)
            .map_err(|_| StoreError::Corrupt { column: "sealed" })?;
        Ok(Some(sealed))
    }

    /// Names of all secrets.
    pub async fn secret_list(&self) -> Result<Vec<String>, StoreError> {
        let rows =
            sqlx::query("SELECT name FROM secrets ORDER BY name").fetch_all(&self.readers).await?;
        rows.iter().map(|row| row::text(row, "name")).collect()
    }

    /// Deletes a secret. Returns whether it existed.
    pub async fn secret_remove(&self, name: &str) -> Result<bool, StoreError> {
        let name = name.to_owned();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    let changed = sqlx::query("DELETE FROM secrets WHERE name = $1")
                        .bind(name)
                        .execute(connection)
                        .await?;
                    Ok(changed.rows_affected() > 0)
                })
            })
            .await
    }
}
