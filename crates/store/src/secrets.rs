//! Secrets, encrypted by the vault; the store never sees a plain value.

use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::Timestamp;

use crate::{DbRow, Store, StoreError, row};

impl Store {
    /// Stores an encrypted secret; replaces an existing one.
    pub async fn secret_set(
        &self,
        name: &str,
        sealed: &[u8],
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO secrets (name, sealed, updated_at) VALUES ($1, $2, $3) ON CONFLICT (name)
             DO UPDATE SET sealed = excluded.sealed, updated_at = excluded.updated_at",
        )
        .bind(name.to_owned())
        .bind(BASE64_STANDARD.encode(sealed))
        .bind(at.as_millis());
        self.writer.execute(None, query).await.map(drop)
    }

    /// The encrypted secret.
    pub async fn secret_get(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let query = sqlx::query("SELECT sealed FROM secrets WHERE name = $1").bind(name.to_owned());
        let read = |row: &DbRow| {
            let sealed = BASE64_STANDARD.decode(row::text(row, "sealed")?);
            sealed.map_err(|_| StoreError::Corrupt { column: "sealed" })
        };
        self.optional(query, read).await
    }

    /// Names of all secrets.
    pub async fn secret_list(&self) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query("SELECT name FROM secrets ORDER BY name");
        self.all(query, |row| row::text(row, "name")).await
    }

    /// Deletes a secret. Returns whether it existed.
    pub async fn secret_remove(&self, name: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM secrets WHERE name = $1").bind(name.to_owned());
        Ok(self.writer.execute(None, query).await? > 0)
    }
}
