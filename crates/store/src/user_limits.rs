//! Limits that admins set for single users, by e-mail address. Absent ones have a default, which
//! the store does not know.

use harvest_proto::api::SetUserLimits;

use crate::{
    DbRow, Store, StoreError,
    row::{self, bigint},
};

/// The limits of a user that differ from the defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GivenLimits {
    /// The address in lower case.
    pub email: String,
    pub sandboxes: Option<u32>,
    pub memory_bytes: Option<u64>,
    pub cpu_millis_per_second: Option<u32>,
    pub writable_bytes: Option<u64>,
    pub lifetime_secs: Option<u64>,
}

impl GivenLimits {
    fn changed(self, change: SetUserLimits) -> Self {
        let SetUserLimits {
            sandboxes,
            memory_bytes,
            cpu_millis_per_second,
            writable_bytes,
            lifetime_secs,
        } = change;
        Self {
            email: self.email,
            sandboxes: sandboxes.unwrap_or(self.sandboxes),
            memory_bytes: memory_bytes.unwrap_or(self.memory_bytes),
            cpu_millis_per_second: cpu_millis_per_second.unwrap_or(self.cpu_millis_per_second),
            writable_bytes: writable_bytes.unwrap_or(self.writable_bytes),
            lifetime_secs: lifetime_secs.unwrap_or(self.lifetime_secs),
        }
    }
}

impl Store {
    pub async fn user_limits_get(&self, email: &str) -> Result<GivenLimits, StoreError> {
        let email = email.to_ascii_lowercase();
        let query = sqlx::query("SELECT * FROM user_limits WHERE email = $1").bind(email.clone());
        let found = self.optional(query, read).await?;
        Ok(found.unwrap_or(GivenLimits { email, ..GivenLimits::default() }))
    }

    /// The users that have limits of their own, by address.
    pub async fn user_limits_list(&self) -> Result<Vec<GivenLimits>, StoreError> {
        self.all(sqlx::query("SELECT * FROM user_limits ORDER BY email"), read).await
    }

    /// Changes the limits of a user and returns them.
    pub async fn user_limits_set(
        &self,
        email: &str,
        change: SetUserLimits,
    ) -> Result<GivenLimits, StoreError> {
        let email = email.to_ascii_lowercase();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    let row = sqlx::query("SELECT * FROM user_limits WHERE email = $1")
                        .bind(email.clone())
                        .fetch_optional(&mut *connection)
                        .await?;
                    let before = match row {
                        Some(row) => read(&row)?,
                        None => GivenLimits { email, ..GivenLimits::default() },
                    };
                    let after = before.changed(change);
                    sqlx::query("DELETE FROM user_limits WHERE email = $1")
                        .bind(after.email.clone())
                        .execute(&mut *connection)
                        .await?;
                    let defaults =
                        GivenLimits { email: after.email.clone(), ..GivenLimits::default() };
                    if after != defaults {
                        sqlx::query(
                            "INSERT INTO user_limits (email, sandboxes, memory_bytes,
                             cpu_millis_per_second, writable_bytes, lifetime_secs)
                             VALUES ($1, $2, $3, $4, $5, $6)",
                        )
                        .bind(after.email.clone())
                        .bind(after.sandboxes.map(i64::from))
                        .bind(after.memory_bytes.map(bigint))
                        .bind(after.cpu_millis_per_second.map(i64::from))
                        .bind(after.writable_bytes.map(bigint))
                        .bind(after.lifetime_secs.map(bigint))
                        .execute(&mut *connection)
                        .await?;
                    }
                    Ok(after)
                })
            })
            .await
    }
}

fn read(row: &DbRow) -> Result<GivenLimits, StoreError> {
    Ok(GivenLimits {
        email: row::text(row, "email")?,
        sandboxes: row::count_optional(row, "sandboxes")?,
        memory_bytes: row::count_optional(row, "memory_bytes")?,
        cpu_millis_per_second: row::count_optional(row, "cpu_millis_per_second")?,
        writable_bytes: row::count_optional(row, "writable_bytes")?,
        lifetime_secs: row::count_optional(row, "lifetime_secs")?,
    })
}
