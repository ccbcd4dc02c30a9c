//! Runs the jobs of a group, each in its own savepoint; consecutive appends share one.

use crate::{
    DbConnection, StoreError,
    append::{self, Append},
    events::NewEvents,
    job::Job,
};

const SAVEPOINT: &str = "SAVEPOINT request";
// Also detects a request that ignored an error: PostgreSQL then refuses the RELEASE.
const NEXT: &str = "RELEASE SAVEPOINT request; SAVEPOINT request";
const UNDO: &str = "ROLLBACK TO SAVEPOINT request";

pub(super) type Jobs = Vec<Box<dyn Job>>;
pub(super) type Failures = Vec<Option<StoreError>>;

/// Runs every job, consecutive appends in batches. An error means that the whole transaction is
/// lost.
pub(super) async fn run_jobs(
    connection: &mut DbConnection,
    jobs: &mut Jobs,
    failures: &mut Failures,
) -> Result<NewEvents, String> {
    let mut events = Vec::new();
    run_sql(connection, SAVEPOINT).await.map_err(|error| StoreError::message(&error))?;
    let mut begin = 0;
    while begin < jobs.len() {
        let mut batch: Vec<&mut Append> = jobs[begin..]
            .iter_mut()
            .take(append::MAX_BATCH)
            .map_while(|job| job.append())
            .collect();
        let count = batch.len().max(1);
        let range = begin..begin + count;
        begin += count;
        if count > 1 {
            let done = append::append_batch(connection, &mut batch).await;
            // After an error, running the appends one by one shows which of them fails.
            if let Ok(Some(mut appended)) = release_or_undo(connection, done).await? {
                events.append(&mut appended);
                continue;
            }
        }
        for (job, failure) in jobs[range.clone()].iter_mut().zip(&mut failures[range]) {
            let done = job.run(connection).await;
            match release_or_undo(connection, done).await? {
                Ok(mut appended) => events.append(&mut appended),
                Err(error) => *failure = Some(error),
            }
        }
    }
    Ok(events)
}

/// Keeps the writes since the savepoint, or undoes them after an error. Fails when the whole
/// transaction is lost.
async fn release_or_undo<T>(
    connection: &mut DbConnection,
    mut done: Result<T, StoreError>,
) -> Result<Result<T, StoreError>, String> {
    if done.is_ok()
        && let Err(error) = run_sql(connection, NEXT).await
    {
        done = Err(error.into());
    }
    let Err(error) = &done else { return Ok(done) };
    // A full disk or a lost connection ends the transaction; the first error is the cause.
    match (run_sql(connection, UNDO).await, error) {
        (Ok(()), _) => Ok(done),
        (Err(_), StoreError::Database(cause)) => Err(StoreError::message(cause)),
        (Err(undo), _) => Err(StoreError::message(&undo)),
    }
}

pub(super) async fn run_sql(
    connection: &mut DbConnection,
    sql: &'static str,
) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(sql).execute(connection).await.map(drop)
}

/// Fails all jobs that have not failed already.
pub(super) fn refuse(jobs: Jobs, failures: Failures, error: impl Fn() -> StoreError) {
    for (job, failure) in jobs.into_iter().zip(failures) {
        job.reply(failure.or_else(|| Some(error())));
    }
}
