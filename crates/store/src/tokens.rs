//! Bearer tokens, by the hash of their value.

use harvest_proto::{Timestamp, bridge::Author};

use crate::{DbRow, Store, StoreError, row};

/// A token, its value apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRecord {
    /// What it is called.
    pub name: String,
    /// Whose it is.
    pub user: Author,
    /// When it was made.
    pub created_at: Timestamp,
}

impl Store {
    /// Keeps a token.
    ///
    /// # Errors
    /// [`StoreError::Exists`] when one has this name.
    pub async fn token_insert(&self, hash: &str, token: &TokenRecord) -> Result<(), StoreError> {
        let (hash, token) = (hash.to_owned(), token.clone());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "INSERT INTO tokens (hash, name, user_name, user_email, created_at)
                         VALUES ($1, $2, $3, $4, $5)",
                    )
                    .bind(hash)
                    .bind(token.name.clone())
                    .bind(token.user.name)
                    .bind(token.user.email)
                    .bind(token.created_at.as_millis())
                    .execute(connection)
                    .await
                    .map_err(|error| StoreError::or_exists(error, format!("token `{}`", token.name)))?;
                    Ok(().into())
                })
            })
            .await
    }

    /// The token with this hash.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn token_find(&self, hash: &str) -> Result<Option<TokenRecord>, StoreError> {
        let row = sqlx::query("SELECT * FROM tokens WHERE hash = $1")
            .bind(hash.to_owned())
            .fetch_optional(&self.readers)
            .await?;
        row.as_ref().map(read).transpose()
    }

    /// All tokens, by name.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn token_list(&self) -> Result<Vec<TokenRecord>, StoreError> {
        let rows = sqlx::query("SELECT * FROM tokens ORDER BY name").fetch_all(&self.readers).await?;
        rows.iter().map(read).collect()
    }

    /// Forgets a token. Answers whether there was one.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn token_remove(&self, name: &str) -> Result<bool, StoreError> {
        let name = name.to_owned();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    let changed = sqlx::query("DELETE FROM tokens WHERE name = $1")
                        .bind(name)
                        .execute(connection)
                        .await?;
                    Ok((changed.rows_affected() > 0).into())
                })
            })
            .await
    }
}

fn read(row: &DbRow) -> Result<TokenRecord, StoreError> {
    Ok(TokenRecord {
        name: row::text(row, "name")?,
        user: Author { name: row::text(row, "user_name")?, email: row::text(row, "user_email")? },
        created_at: row::time(row, "created_at")?,
    })
}
