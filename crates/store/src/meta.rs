//! Values about the installation itself, by key.

use crate::{Store, StoreError, row};

impl Store {
    pub async fn meta_get(&self, key: &str) -> Result<Option<String>, StoreError> {
        let row = sqlx::query("SELECT value FROM meta WHERE key = $1")
            .bind(key.to_owned())
            .fetch_optional(&self.readers)
            .await?;
        row.map(|row| row::text(&row, "value")).transpose()
    }

    /// Stores `value` under `key` unless the key exists. Returns the stored value.
    pub async fn meta_claim(&self, key: &str, value: &str) -> Result<String, StoreError> {
        let (key, value) = (key.to_owned(), value.to_owned());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING")
                        .bind(key.clone())
                        .bind(value)
                        .execute(&mut *connection)
                        .await?;
                    let stored = sqlx::query("SELECT value FROM meta WHERE key = $1")
                        .bind(key)
                        .fetch_one(&mut *connection)
                        .await?;
                    row::text(&stored, "value")
                })
            })
            .await
    }

    /// Stores `value` under `key`.
    pub async fn meta_set(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let (key, value) = (key.to_owned(), value.to_owned());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "INSERT INTO meta (key, value) VALUES ($1, $2)
                         ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                    )
                    .bind(key)
                    .bind(value)
                    .execute(connection)
                    .await?;
                    Ok(())
                })
            })
            .await
    }
}
