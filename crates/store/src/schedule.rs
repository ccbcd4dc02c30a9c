//! Runs of the schedule that keeps builds fresh, by their time.

use harvest_proto::{
    Timestamp,
    api::{RunStatus, ScheduleRun},
};

use crate::{
    DbRow, Lease, Store, StoreError,
    row::{self, bigint},
};

// Ten days of half hours.
const KEPT_RUNS: i64 = 480;

impl Store {
    /// Records the start of a run. A run that a killed server left behind has failed.
    pub async fn schedule_begin(&self, lease: Lease, run: &ScheduleRun) -> Result<(), StoreError> {
        let abandoned = sqlx::query(
            "UPDATE schedule_runs SET status = 'failed', tail = 'the server was restarted',
             ended_at = $1 WHERE status = 'running'",
        )
        .bind(run.started.as_millis());
        self.writer.execute(Some(lease), abandoned).await?;
        let query = sqlx::query(
            "INSERT INTO schedule_runs (at, status, started_at, attempts, rebuilt, images, tail)
             VALUES ($1, 'running', $2, 0, '', '', '')",
        )
        .bind(run.timestamp.as_millis())
        .bind(run.started.as_millis());
        let begun = self.writer.execute(Some(lease), query).await.map(drop);
        begun.map_err(|error| StoreError::or_exists(error, "a run at this time"))
    }

    /// Records the end of a run, and forgets the oldest runs.
    pub async fn schedule_end(&self, lease: Lease, run: &ScheduleRun) -> Result<(), StoreError> {
        let rebuilt: Vec<&str> = run.rebuilt.iter().map(|name| name.as_str()).collect();
        let query = sqlx::query(
            "UPDATE schedule_runs SET status = $2, ended_at = $3, attempts = $4, rebuilt = $5,
             tail = $6, images = $7 WHERE at = $1",
        )
        .bind(run.timestamp.as_millis())
        .bind(run.status.as_str())
        .bind(run.ended.map(Timestamp::as_millis))
        .bind(bigint(run.attempts))
        .bind(rebuilt.join(" "))
        .bind(run.tail.clone())
        .bind(run.images.join(" "));
        self.writer.execute(Some(lease), query).await?;
        let old = sqlx::query(
            "DELETE FROM schedule_runs WHERE at <
             (SELECT MIN(k.at) FROM (SELECT n.at FROM schedule_runs n ORDER BY n.at DESC LIMIT $1) k)",
        )
        .bind(KEPT_RUNS);
        self.writer.execute(Some(lease), old).await.map(drop)
    }

    /// The runs that are kept, newest first.
    pub async fn schedule_list(&self) -> Result<Vec<ScheduleRun>, StoreError> {
        let query =
            sqlx::query("SELECT * FROM schedule_runs ORDER BY at DESC LIMIT $1").bind(KEPT_RUNS);
        self.all(query, read).await
    }

    /// The newest run.
    pub async fn schedule_last(&self) -> Result<Option<ScheduleRun>, StoreError> {
        let query = sqlx::query("SELECT * FROM schedule_runs ORDER BY at DESC LIMIT 1");
        self.optional(query, read).await
    }
}

fn read(row: &DbRow) -> Result<ScheduleRun, StoreError> {
    let status: RunStatus = row::parsed(row, "status")?;
    let rebuilt = row::text(row, "rebuilt")?;
    let names: Result<Vec<_>, _> = rebuilt.split_whitespace().map(str::parse).collect();
    let rebuilt = names.unwrap_or_default();
    let images = row::text(row, "images")?;
    let images: Vec<String> = images.split_whitespace().map(str::to_owned).collect();
    Ok(ScheduleRun {
        status,
        timestamp: row::time(row, "at")?,
        started: row::time(row, "started_at")?,
        ended: row::time_optional(row, "ended_at")?,
        attempts: row::count(row, "attempts")?,
        image_rebuilt: !rebuilt.is_empty() || !images.is_empty(),
        images,
        rebuilt,
        tail: row::text(row, "tail")?,
    })
}
