//! The server lease: a number that rises whenever a server takes over this database. Every write of
//! a session carries it, so that a superseded server can write nothing more, even while it still
//! runs.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use harvest_proto::Timestamp;

use crate::{DbConnection, Store, StoreError, reserve::OnFullDisk, row};

/// Number of a server's lease. Higher is newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lease(pub u64);

impl Store {
    /// Takes over the database: from now on only writes with the returned lease succeed.
    ///
    /// This fences an older server; it does not prevent a second one on the same home. That is done
    /// by the binary's file lock, which the kernel releases when its holder dies. A store that has
    /// lost its lease stays fenced; continuing needs a new `Store`.
    pub async fn server_lease(&self, at: Timestamp) -> Result<Lease, StoreError> {
        let lease: Lease = self
            .writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    let row = sqlx::query(
                        "INSERT INTO leases (name, number, taken_at) VALUES ('server', 1, $1)
                         ON CONFLICT (name) DO UPDATE SET
                         number = leases.number + 1, taken_at = excluded.taken_at
                         RETURNING number",
                    )
                    .bind(at.as_millis())
                    .fetch_one(connection)
                    .await?;
                    Ok(Lease(row::count(&row, "number")?))
                })
            })
            .await?;
        self.writer.hold(lease);
        Ok(lease)
    }
}

/// The lease of this process, once it has one. The writer refuses every request when the database
/// has a newer lease, also requests that carry none.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeldLease(Arc<AtomicU64>);

impl HeldLease {
    pub(crate) fn get(&self) -> Option<Lease> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| *number > 0).map(Lease)
    }

    pub(crate) fn set(&self, lease: Lease) {
        self.0.fetch_max(lease.0, Ordering::AcqRel);
    }
}

/// Fails unless `lease` is the newest.
pub(crate) async fn check(connection: &mut DbConnection, lease: Lease) -> Result<(), StoreError> {
    let row = sqlx::query("SELECT number FROM leases WHERE name = 'server'")
        .fetch_optional(connection)
        .await?;
    let newest = row.map_or(Ok(0), |row| row::count(&row, "number"))?;
    if newest == lease.0 { Ok(()) } else { Err(StoreError::LeaseLost) }
}
