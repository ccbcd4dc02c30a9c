//! Values about the installation itself, by key.

use crate::{Store, StoreError, row};

impl Store {
    pub async fn meta_get(&self, key: &str) -> Result<Option<String>, StoreError> {
        let query = sqlx::query("SELECT value FROM meta WHERE key = $1").bind(key.to_owned());
        self.optional(query, |row| row::text(row, "value")).await
    }

    /// Stores `value` under `key` unless the key exists. Returns the stored value.
    pub async fn meta_claim(&self, key: &str, value: &str) -> Result<String, StoreError> {
        let query = sqlx::query(
            "INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET
             value = meta.value RETURNING value",
        )
        .bind(key.to_owned())
        .bind(value.to_owned());
        let stored = self.writer.run(move |connection| {
            Box::pin(async move { row::text(&query.fetch_one(connection).await?, "value") })
        });
        stored.await
    }

    /// Stores `value` under `key`.
    pub async fn meta_set(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO meta (key, value) VALUES ($1, $2)
             ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        )
        .bind(key.to_owned())
        .bind(value.to_owned());
        self.writer.execute(None, query).await.map(drop)
    }
}
