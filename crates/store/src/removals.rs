//! Pending removals: objects outside the database that are to be deleted. Written in the
//! transaction that deletes their last reference and deleted when the object is gone, so that the
//! next server finishes an interrupted removal.

use harvest_proto::{RepositoryName, SandboxId, SnapshotId, Timestamp};

use crate::{
    DbConnection, DbQuery, DbRow, Lease, Store, StoreError, leases, reserve::OnFullDisk, row,
};

/// An unused object to remove. Removing it must be idempotent: a removal may be repeated.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Removal {
    /// A sandbox with its disk.
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
    /// The content of an artifact, by its SHA-256.
    Artifact(String),
    /// The `/mnt/state` folder of a repository.
    State(RepositoryName),
    /// The copy of a repository on the local forge. Nothing to remove when the URL is not the
    /// forge's.
    ForgeCopy {
        url: String,
        /// Name of the secret for the copy, removed with it.
        secret: Option<String>,
    },
}

impl Removal {
    fn columns(&self) -> (&'static str, String) {
        match self {
            Self::Sandbox(id) => ("sandbox", id.to_string()),
            Self::Snapshot(id) => ("snapshot", id.to_string()),
            Self::Artifact(sha256) => ("artifact", sha256.clone()),
            Self::State(repository) => ("state", repository.to_string()),
            // A URL contains no space.
            Self::ForgeCopy { url, secret: Some(secret) } => {
                ("forge_copy", format!("{url} {secret}"))
            }
            Self::ForgeCopy { url, secret: None } => ("forge_copy", url.clone()),
        }
    }
}

impl Store {
    /// All pending removals, sandboxes before the snapshots they use.
    pub async fn removal_list(&self) -> Result<Vec<Removal>, StoreError> {
        // Alphabetically a sandbox comes before a snapshot; the order of the other kinds is
        // irrelevant.
        let query = sqlx::query("SELECT kind, id FROM removals ORDER BY kind, created_at, id");
        self.all(query, read).await
    }

    /// Adds pending removals.
    pub async fn removal_add(
        &self,
        lease: Lease,
        removals: Vec<Removal>,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    for removal in &removals {
                        insert(connection, removal, at).await?;
                    }
                    Ok(())
                })
            })
            .await
    }

    /// Deletes a removal that is done.
    pub async fn removal_done(&self, lease: Lease, removal: &Removal) -> Result<(), StoreError> {
        let query = delete(removal);
        self.writer.execute_on(OnFullDisk::UseReserve, Some(lease), query).await.map(drop)
    }
}

fn read(row: &DbRow) -> Result<Removal, StoreError> {
    Ok(match row::text(row, "kind")?.as_str() {
        "sandbox" => Removal::Sandbox(row::parsed(row, "id")?),
        "snapshot" => Removal::Snapshot(row::parsed(row, "id")?),
        "artifact" => Removal::Artifact(row::text(row, "id")?),
        "state" => Removal::State(row::parsed(row, "id")?),
        "forge_copy" => {
            let id = row::text(row, "id")?;
            let (url, secret) =
                id.split_once(' ').map_or((&id[..], None), |(url, name)| (url, Some(name)));
            Removal::ForgeCopy { url: url.to_owned(), secret: secret.map(str::to_owned) }
        }
        _ => return Err(StoreError::Corrupt { column: "kind" }),
    })
}

pub(crate) async fn insert(
    connection: &mut DbConnection,
    removal: &Removal,
    at: Timestamp,
) -> Result<(), StoreError> {
    let (kind, id) = removal.columns();
    sqlx::query(
        "INSERT INTO removals (kind, id, created_at) VALUES ($1, $2, $3) ON CONFLICT (kind, id) DO NOTHING",
    )
    .bind(kind)
    .bind(id)
    .bind(at.as_millis())
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes a removal that is done or no longer wanted.
pub(crate) fn delete(removal: &Removal) -> DbQuery<'static> {
    let (kind, id) = removal.columns();
    sqlx::query("DELETE FROM removals WHERE kind = $1 AND id = $2").bind(kind).bind(id)
}
