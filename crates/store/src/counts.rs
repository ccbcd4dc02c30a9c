//! How many there are of what, for whoever watches the server.

use harvest_proto::api::SessionState;

use crate::{Store, StoreError, row};

impl Store {
    /// Sessions by state; a state nobody is in is left out.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn session_count(&self) -> Result<Vec<(SessionState, u64)>, StoreError> {
        let rows = sqlx::query(
            "SELECT state, COUNT(*) AS number FROM sessions GROUP BY state ORDER BY state",
        )
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(|row| Ok((row::word(row, "state")?, row::count(row, "number")?))).collect()
    }

    /// Prompts that wait for their turn.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn prompt_waiting(&self) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT COUNT(*) AS number FROM prompts WHERE status = 'queued'")
            .fetch_one(&self.readers)
            .await?;
        row::count(&row, "number")
    }
}
