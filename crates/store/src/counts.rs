//! Counts for metrics.

use harvest_proto::api::SessionState;

use crate::{Store, StoreError, row};

impl Store {
    /// Number of sessions per state; states without sessions are omitted.
    pub async fn session_count(&self) -> Result<Vec<(SessionState, u64)>, StoreError> {
        let rows = sqlx::query(
            "SELECT state, COUNT(*) AS number FROM sessions GROUP BY state ORDER BY state",
        )
        .fetch_all(&self.readers)
        .await?;
        rows.iter()
            .map(|row| Ok((row::enum_name(row, "state")?, row::count(row, "number")?)))
            .collect()
    }

    /// Number of queued prompts.
    pub async fn prompt_queued_count(&self) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT COUNT(*) AS number FROM prompts WHERE status = 'queued'")
            .fetch_one(&self.readers)
            .await?;
        row::count(&row, "number")
    }
}
