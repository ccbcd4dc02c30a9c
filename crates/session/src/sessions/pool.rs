//! The warm pool, as users see it.

use harvest_proto::api::{PoolSandbox, PoolStatus, WarmRepository, WarmingSandbox};

use super::Sessions;
use crate::error::SessionError;

impl Sessions {
    /// The sandboxes that wait for a session, oldest first.
    #[must_use]
    pub fn pool(&self) -> Vec<PoolSandbox> {
        self.shared.pool.list()
    }

    /// Reserves a waiting sandbox for the next session of this user on a repository, or starts one.
    ///
    /// # Errors
    /// When the repository has no build, or there is no room for a sandbox.
    pub async fn warm(
        &self,
        warm: WarmRepository,
        user: &str,
    ) -> Result<WarmingSandbox, SessionError> {
        let sandbox_id = self.shared.pool.warm(warm, user).await?;
        Ok(WarmingSandbox { sandbox_id, status: PoolStatus::Warming })
    }
}
