//! The server lease: a number that rises whenever a server takes this store. Every write of a session
//! carries it, so that a server that was taken over can write nothing more, even while it still runs.

use harvest_proto::Timestamp;

use crate::{DbConnection, Store, StoreError, row};

/// Whose turn it is to write. Higher is newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lease(pub u64);

impl Store {
    /// Takes the store over: from now on only writes with the lease this answers are done.
    ///
    /// It fences; it does not refuse. That no second server is started on the same home is the
    /// binary's lock on a file, which the kernel lets go when its holder dies. A store that has lost its lease
    /// stays so; who wants to go on opens another.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn server_lease(&self, at: Timestamp) -> Result<Lease, StoreError> {
        let lease: Lease = self
            .writer
            .run(move |connection| {
                Box::pin(async move {
                    let row = sqlx::query(
                        "INSERT INTO leases (name, number, taken_at) VALUES ('server', 1, $1)
                         ON CONFLICT (name) DO UPDATE SET number = leases.number + 1, taken_at = excluded.taken_at
                         RETURNING number",
                    )
                    .bind(at.as_millis())
                    .fetch_one(connection)
                    .await?;
                    Ok(Lease(row::count(&row, "number")?).into())
                })
            })
            .await?;
        self.writer.hold(lease);
        Ok(lease)
    }
}

/// Refuses when `lease` is not the newest.
pub(crate) async fn check(connection: &mut DbConnection, lease: Lease) -> Result<(), StoreError> {
    let row = sqlx::query("SELECT number FROM leases WHERE name = 'server'")
        .fetch_optional(connection)
        .await?;
    let newest = row.map_or(Ok(0), |row| row::count(&row, "number"))?;
    if newest == lease.0 { Ok(()) } else { Err(StoreError::LeaseLost) }
}
