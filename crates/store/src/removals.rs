//! What is to be removed from the machine. It is written in the transaction that forgets who used it and
//! forgotten when it is gone, so that whatever dies in between, the next server finishes it.

use harvest_proto::{SandboxId, SnapshotId, Timestamp};

use crate::{DbConnection, DbRow, Lease, Store, StoreError, leases, row};

/// Something nobody uses any more. To be removed idempotently: it may be asked for again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Removal {
    /// A sandbox, with its disk.
    Sandbox(SandboxId),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// What sandboxes of a repository kept at `/mnt/state`, by the repository's name.
    State(String),
    /// What the local forge was made to hold of a repository, with the secret that opens it; nothing where the
    /// URL is not the forge's.
    Copy {
        /// As the repository had it.
        url: String,
        /// The secret's name.
        secret: Option<String>,
    },
}

impl Removal {
    fn columns(&self) -> (&'static str, String) {
        match self {
            Self::Sandbox(id) => ("sandbox", id.to_string()),
            Self::Snapshot(id) => ("snapshot", id.to_string()),
            Self::State(repository) => ("state", repository.clone()),
            // A URL holds no space.
            Self::Copy { url, secret: Some(secret) } => ("copy", format!("{url} {secret}")),
            Self::Copy { url, secret: None } => ("copy", url.clone()),
        }
    }
}

impl Store {
    /// Everything that is to be removed: sandboxes first, since they stand on snapshots.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn removal_list(&self) -> Result<Vec<Removal>, StoreError> {
        // By the alphabet, which happens to be the order wanted; it does not matter for copies and states.
        let rows = sqlx::query("SELECT kind, id FROM removals ORDER BY kind, created_at, id")
            .fetch_all(&self.readers)
            .await?;
        rows.iter().filter_map(|row| read(row).transpose()).collect()
    }

    /// These are to be removed.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn removal_add(
        &self,
        lease: Lease,
        removals: Vec<Removal>,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    for removal in &removals {
                        insert(connection, removal, at).await?;
                    }
                    Ok(().into())
                })
            })
            .await
    }

    /// It is gone.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn removal_done(&self, lease: Lease, removal: &Removal) -> Result<(), StoreError> {
        let removal = removal.clone();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    forget(connection, &removal).await?;
                    Ok(().into())
                })
            })
            .await
    }
}

/// `None` for what only a later version knows how to remove: it does when it is back.
fn read(row: &DbRow) -> Result<Option<Removal>, StoreError> {
    Ok(Some(match row::text(row, "kind")?.as_str() {
        "sandbox" => Removal::Sandbox(row::parsed(row, "id")?),
        "snapshot" => Removal::Snapshot(row::parsed(row, "id")?),
        "state" => Removal::State(row::text(row, "id")?),
        "copy" => {
            let id = row::text(row, "id")?;
            let (url, secret) =
                id.split_once(' ').map_or((&id[..], None), |(url, name)| (url, Some(name)));
            Removal::Copy { url: url.to_owned(), secret: secret.map(str::to_owned) }
        }
        _ => return Ok(None),
    }))
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

/// It is not to be removed after all, or it is gone.
pub(crate) async fn forget(
    connection: &mut DbConnection,
    removal: &Removal,
) -> Result<(), StoreError> {
    let (kind, id) = removal.columns();
    sqlx::query("DELETE FROM removals WHERE kind = $1 AND id = $2")
        .bind(kind)
        .bind(id)
        .execute(connection)
        .await?;
    Ok(())
}
