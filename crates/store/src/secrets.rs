//! Secrets, encrypted by the vault; the store never sees a plain value.

use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::{SecretOwner, SessionId, Timestamp};
use sqlx::AssertSqlSafe;

use crate::{DbConnection, DbRow, Store, StoreError, reserve::OnFullDisk, row, target::Target};

// Every request to a host that secrets are for reads all secrets of its session.
const MAX_SECRETS: i64 = 200;

const COLUMNS: &str = "owner, name, sealed, hosts, header, updated_at";

/// A secret as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedSecret {
    pub owner: SecretOwner,
    pub name: String,
    pub sealed: Vec<u8>,
    /// The hosts it is added for and the header; `None` keeps those of an earlier value.
    pub binding: Option<SecretBinding>,
    pub updated_at: Timestamp,
}

/// To which requests a secret is added, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretBinding {
    pub hosts: Vec<String>,
    pub header: String,
}

impl SealedSecret {
    /// The hosts it is added for.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        self.binding.as_ref().map_or(&[], |binding| &binding.hosts)
    }
}

impl Store {
    /// Stores a secret; replaces that of the same owner and name.
    pub async fn secret_set(&self, secret: SealedSecret) -> Result<(), StoreError> {
        self.writer
            .run(move |connection| Box::pin(async move { set(connection, secret).await }))
            .await
    }

    /// The secret with this name of the first of the owners that has one.
    pub async fn secret_find(
        &self,
        owners: &[SecretOwner],
        name: &str,
    ) -> Result<Option<SealedSecret>, StoreError> {
        let found = self.secrets_named(owners, Some(name)).await?;
        Ok(found.into_iter().next())
    }

    /// The secrets that are in effect for owners in this order: of each name, that of the first
    /// owner that has one.
    pub async fn secrets_of(
        &self,
        owners: &[SecretOwner],
    ) -> Result<Vec<SealedSecret>, StoreError> {
        self.secrets_named(owners, None).await
    }

    async fn secrets_named(
        &self,
        owners: &[SecretOwner],
        name: Option<&str>,
    ) -> Result<Vec<SealedSecret>, StoreError> {
        if owners.is_empty() {
            return Ok(Vec::new());
        }
        let places: Vec<String> =
            (0..owners.len()).map(|number| format!("${}", number + 2)).collect();
        let statement = format!(
            "SELECT {COLUMNS} FROM secrets WHERE (name = $1 OR $1 = '') AND owner IN ({})",
            places.join(", ")
        );
        let query = sqlx::query(AssertSqlSafe(statement)).bind(name.unwrap_or_default().to_owned());
        let query = owners.iter().fold(query, |query, owner| query.bind(owner.to_string()));
        let mut found: Vec<SealedSecret> = self.all(query, read).await?;
        let rank = |secret: &SealedSecret| owners.iter().position(|owner| *owner == secret.owner);
        found.sort_by(|one, other| (&one.name, rank(one)).cmp(&(&other.name, rank(other))));
        found.dedup_by(|later, earlier| later.name == earlier.name);
        Ok(found)
    }

    /// All secrets, by name.
    pub async fn secret_list(&self) -> Result<Vec<SealedSecret>, StoreError> {
        let statement = format!("SELECT {COLUMNS} FROM secrets ORDER BY name, owner");
        self.all(sqlx::query(AssertSqlSafe(statement)), read).await
    }

    /// Deletes a secret. Returns whether it existed.
    pub async fn secret_remove(&self, owner: &SecretOwner, name: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM secrets WHERE owner = $1 AND name = $2")
            .bind(owner.to_string())
            .bind(name.to_owned());
        Ok(self.writer.execute_on(OnFullDisk::UseReserve, None, query).await? > 0)
    }
}

/// Stores a secret of a session in the same transaction as other writes.
pub(crate) async fn insert(
    target: &mut Target<'_>,
    secret: SealedSecret,
) -> Result<(), StoreError> {
    let owner = SecretOwner::Session(SessionId::clone(&target.session));
    debug_assert_eq!(secret.owner, owner);
    set(target.connection, secret).await
}

async fn set(connection: &mut DbConnection, secret: SealedSecret) -> Result<(), StoreError> {
    let owner = secret.owner.to_string();
    let others =
        sqlx::query("SELECT COUNT(*) AS others FROM secrets WHERE owner = $1 AND name <> $2")
            .bind(owner.clone())
            .bind(secret.name.clone())
            .fetch_one(&mut *connection)
            .await?;
    if row::count::<i64>(&others, "others")? >= MAX_SECRETS {
        let what = format!("there are {MAX_SECRETS} secrets already; remove one first");
        return Err(StoreError::TooLarge { what });
    }
    let (session, repository) = match &secret.owner {
        SecretOwner::Session(session) => (Some(session.to_string()), None),
        SecretOwner::Repository(name) => (None, Some(name.to_string())),
        SecretOwner::User(_) | SecretOwner::Global => (None, None),
    };
    let (hosts, header) = match secret.binding {
        Some(SecretBinding { hosts, header }) => (Some(hosts.join(",")), Some(header)),
        None => (None, None),
    };
    sqlx::query(
        "INSERT INTO secrets (owner, name, session, repository, sealed, hosts, header, updated_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (owner, name) DO UPDATE SET
         sealed = excluded.sealed, updated_at = excluded.updated_at,
         hosts = COALESCE(excluded.hosts, secrets.hosts),
         header = COALESCE(excluded.header, secrets.header)",
    )
    .bind(owner)
    .bind(secret.name)
    .bind(session)
    .bind(repository)
    .bind(BASE64_STANDARD.encode(secret.sealed))
    .bind(hosts)
    .bind(header)
    .bind(secret.updated_at.as_millis())
    .execute(connection)
    .await?;
    Ok(())
}

fn read(row: &DbRow) -> Result<SealedSecret, StoreError> {
    let corrupt = StoreError::Corrupt { column: "sealed" };
    let sealed = BASE64_STANDARD.decode(row::text(row, "sealed")?).map_err(|_| corrupt)?;
    let binding = match (row::optional(row, "hosts")?, row::optional(row, "header")?) {
        (Some(hosts), Some(header)) => {
            let hosts = hosts.split(',').filter(|host| !host.is_empty());
            Some(SecretBinding { hosts: hosts.map(str::to_owned).collect(), header })
        }
        _ => None,
    };
    Ok(SealedSecret {
        owner: row::parsed(row, "owner")?,
        name: row::text(row, "name")?,
        sealed,
        binding,
        updated_at: row::time(row, "updated_at")?,
    })
}
