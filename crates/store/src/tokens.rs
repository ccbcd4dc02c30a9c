//! Access tokens, by the hash of their value. Permissions are checked elsewhere.

use harvest_proto::{Timestamp, api::Token, bridge::Author};

use crate::{
    DbConnection, DbRow, Store, StoreError,
    row::{self, to_enum_name},
};

impl Store {
    pub async fn token_insert(&self, hash: &str, token: &Token) -> Result<(), StoreError> {
        let (hash, token) = (hash.to_owned(), token.clone());
        self.writer.run(move |connection| Box::pin(insert(connection, hash, token))).await
    }

    /// Stores a token in place of one of the same name, which becomes invalid.
    pub async fn token_replace(&self, hash: &str, token: &Token) -> Result<(), StoreError> {
        let (hash, token) = (hash.to_owned(), token.clone());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("DELETE FROM tokens WHERE name = $1")
                        .bind(token.name.clone())
                        .execute(&mut *connection)
                        .await?;
                    insert(connection, hash, token).await
                })
            })
            .await
    }

    pub async fn token_find(&self, hash: &str) -> Result<Option<Token>, StoreError> {
        let query = sqlx::query("SELECT * FROM tokens WHERE hash = $1").bind(hash.to_owned());
        self.optional(query, read).await
    }

    pub async fn token_get(&self, name: &str) -> Result<Token, StoreError> {
        let query = sqlx::query("SELECT * FROM tokens WHERE name = $1").bind(name.to_owned());
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("token `{name}`")))
    }

    /// All tokens, by name.
    pub async fn token_list(&self) -> Result<Vec<Token>, StoreError> {
        let query = sqlx::query("SELECT * FROM tokens ORDER BY name");
        self.all(query, read).await
    }

    /// Records when a token was last used.
    pub async fn token_used(&self, name: &str, at: Timestamp) -> Result<(), StoreError> {
        let query = sqlx::query("UPDATE tokens SET last_used = $2 WHERE name = $1")
            .bind(name.to_owned())
            .bind(at.as_millis());
        self.writer.execute(None, query).await.map(drop)
    }

    /// Changes the user of a token.
    pub async fn token_set_user(&self, name: &str, user: &Author) -> Result<(), StoreError> {
        let query =
            sqlx::query("UPDATE tokens SET user_name = $2, user_email = $3 WHERE name = $1")
                .bind(name.to_owned())
                .bind(user.name.clone())
                .bind(user.email.clone());
        self.writer.execute(None, query).await.map(drop)
    }

    /// Deletes a token unless it is the last admin token. Returns whether it was deleted.
    pub async fn token_remove(&self, name: &str) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "DELETE FROM tokens WHERE name = $1 AND
             (role <> 'admin' OR (SELECT COUNT(*) FROM tokens WHERE role = 'admin') > 1)",
        )
        .bind(name.to_owned());
        Ok(self.writer.execute(None, query).await? > 0)
    }
}

async fn insert(
    connection: &mut DbConnection,
    hash: String,
    token: Token,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO tokens (hash, name, user_name, user_email, role, created_at) VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(hash)
    .bind(token.name.clone())
    .bind(token.user.name)
    .bind(token.user.email)
    .bind(to_enum_name(&token.role))
    .bind(token.created_at.as_millis())
    .execute(connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("token `{}`", token.name)))?;
    Ok(())
}

fn read(row: &DbRow) -> Result<Token, StoreError> {
    Ok(Token {
        name: row::text(row, "name")?,
        user: Author { name: row::text(row, "user_name")?, email: row::text(row, "user_email")? },
        role: row::enum_name(row, "role")?,
        created_at: row::time(row, "created_at")?,
        last_used: row::time_optional(row, "last_used")?,
    })
}
