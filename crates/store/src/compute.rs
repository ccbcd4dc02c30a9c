//! What sandboxes use of the machine: CPU time and memory, summed up by session and hour. A sandbox
//! counts its CPU time from its start, and the last count seen is stored; so each microsecond is
//! added once, whichever server sees it. Memory is the integral between two readings.

use std::time::Duration;

use harvest_proto::{RepositoryName, SandboxId, SessionId, Timestamp};

use crate::{
    DbConnection, Lease, Store, StoreError, budgets, leases,
    reserve::OnFullDisk,
    row::{self, bounded},
};

const HOUR_MILLIS: i64 = 3_600_000;

// A meter that was not read for so long is of a sandbox that no longer exists.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);

/// Whom a sandbox counts for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ComputeOwner {
    /// None for builds and checks.
    pub session: Option<SessionId>,
    pub repository: Option<RepositoryName>,
    pub user: Option<String>,
}

/// What a sandbox has used so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeReading {
    pub sandbox: SandboxId,
    pub owner: ComputeOwner,
    /// Where its memory counts from if this is the first reading, by the clock of the readings.
    pub since: Timestamp,
    /// Since its start.
    pub cpu_micros: u64,
    /// At the time of the reading.
    pub memory_bytes: u64,
}

/// The last reading of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Meter {
    cpu_micros: u64,
    memory_bytes: u64,
    at: Timestamp,
}

/// What was used between two readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Used {
    cpu_micros: u64,
    memory_kib_seconds: u64,
}

/// What was used since the last reading, or since the start of the sandbox. Pure.
fn used_since(last: Option<Meter>, since: Timestamp, now: Meter) -> Used {
    let last = last.unwrap_or(Meter { cpu_micros: 0, at: since, ..now });
    // A restarted sandbox counts from zero.
    let cpu_micros = now.cpu_micros.checked_sub(last.cpu_micros).unwrap_or(now.cpu_micros);
    let mean_bytes = last.memory_bytes.midpoint(now.memory_bytes);
    let millis = now.at.since(last.at).as_millis();
    let kib_seconds = u128::from(mean_bytes) * millis / (1024 * 1000);
    Used { cpu_micros, memory_kib_seconds: u64::try_from(kib_seconds).unwrap_or(u64::MAX) }
}

impl Store {
    /// Adds what sandboxes have used since their last readings. `clock` is monotonic and measures
    /// the time between readings; `at` decides in which hour they count.
    pub async fn compute_add(
        &self,
        lease: Lease,
        readings: Vec<ComputeReading>,
        clock: Timestamp,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        self.writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    for reading in &readings {
                        add(connection, reading, clock, at).await?;
                    }
                    sqlx::query("DELETE FROM compute_meters WHERE at < $1")
                        .bind(clock.before(FORGOTTEN_AFTER).as_millis())
                        .execute(connection)
                        .await?;
                    Ok(())
                })
            })
            .await
    }
}

async fn add(
    connection: &mut DbConnection,
    reading: &ComputeReading,
    clock: Timestamp,
    at: Timestamp,
) -> Result<(), StoreError> {
    let ComputeReading { cpu_micros, memory_bytes, since, .. } = *reading;
    let sandbox = reading.sandbox.to_string();
    let found = sqlx::query("SELECT cpu, memory, at FROM compute_meters WHERE sandbox = $1")
        .bind(sandbox.clone())
        .fetch_optional(&mut *connection)
        .await?;
    let last = found.map(|row| {
        Ok::<_, StoreError>(Meter {
            cpu_micros: row::count(&row, "cpu")?,
            memory_bytes: row::count(&row, "memory")?,
            at: row::time(&row, "at")?,
        })
    });
    let used = used_since(last.transpose()?, since, Meter { cpu_micros, memory_bytes, at: clock });
    sqlx::query(
        "INSERT INTO compute_meters (sandbox, cpu, memory, at) VALUES ($1, $2, $3, $4)
         ON CONFLICT (sandbox) DO UPDATE SET cpu = excluded.cpu, memory = excluded.memory,
         at = excluded.at",
    )
    .bind(sandbox)
    .bind(bounded(cpu_micros))
    .bind(bounded(memory_bytes))
    .bind(clock.as_millis())
    .execute(&mut *connection)
    .await?;
    if used == Used::default() {
        return Ok(());
    }
    let owner = &reading.owner;
    let (session, repository) =
        (owner.session.as_ref().map(ToString::to_string), owner.repository.as_ref());
    sqlx::query(
        "INSERT INTO compute (session, repository, user_email, day, hour, cpu, memory)
         VALUES ($1, $2, $3, $4, $5, $6, $7)
         ON CONFLICT (session, repository, user_email, hour) DO UPDATE
         SET cpu = compute.cpu + excluded.cpu, memory = compute.memory + excluded.memory",
    )
    .bind(session.unwrap_or_default())
    .bind(repository.map(ToString::to_string).unwrap_or_default())
    .bind(owner.user.clone().unwrap_or_default())
    .bind(budgets::day(at))
    .bind(hour_of(at))
    .bind(bounded(used.cpu_micros))
    .bind(bounded(used.memory_kib_seconds))
    .execute(connection)
    .await?;
    Ok(())
}

/// The beginning of the hour.
pub(crate) fn hour_of(at: Timestamp) -> i64 {
    at.as_millis().div_euclid(HOUR_MILLIS) * HOUR_MILLIS
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BEGIN: Timestamp = Timestamp::from_millis(0);

    fn meter(cpu_micros: u64, memory_bytes: u64, millis: i64) -> Meter {
        Meter { cpu_micros, memory_bytes, at: Timestamp::from_millis(millis) }
    }

    proptest! {
        #[test]
        fn every_microsecond_is_counted_once(steps in prop::collection::vec(0..1_000_000u64, 1..50)) {
            let mut last = None;
            let (mut total, mut counted) = (0, 0);
            for (step, millis) in steps.into_iter().zip(0..) {
                total += step;
                let now = meter(total, 0, millis);
                counted += used_since(last, BEGIN, now).cpu_micros;
                last = Some(now);
            }
            prop_assert_eq!(counted, total);
        }
    }

    #[test]
    fn memory_is_the_mean_of_two_readings() {
        let used = used_since(Some(meter(5, 1 << 20, 0)), BEGIN, meter(5, 3 << 20, 10_000));
        assert_eq!(used, Used { cpu_micros: 0, memory_kib_seconds: 20 * 1024 });
        let first = used_since(None, Timestamp::from_millis(8_000), meter(7, 1 << 20, 10_000));
        assert_eq!(first, Used { cpu_micros: 7, memory_kib_seconds: 2 * 1024 });
        assert_eq!(used_since(Some(meter(7, 1, 10)), BEGIN, meter(7, 1, 0)), Used::default());
    }

    #[test]
    fn restarted_sandbox_counts_from_zero() {
        let used = used_since(Some(meter(50, 0, 0)), BEGIN, meter(20, 0, 1));
        assert_eq!(used.cpu_micros, 20);
    }
}
