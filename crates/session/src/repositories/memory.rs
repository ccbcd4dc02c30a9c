//! The memory of a repository as users read and replace it. Agents change it with the tools of
//! their sessions.

use harvest_proto::{RepositoryName, api::MemoryGraph};

use super::Repositories;
use crate::error::SessionError;

impl Repositories {
    /// # Errors
    /// When the repository does not exist.
    pub async fn memory(&self, name: &RepositoryName) -> Result<MemoryGraph, SessionError> {
        self.get(name).await?;
        Ok(self.shared.store.memory_read(name).await?)
    }

    /// Replaces the whole memory; returns what is stored.
    ///
    /// # Errors
    /// When the repository does not exist, or the graph is too large.
    pub async fn memory_replace(
        &self,
        name: &RepositoryName,
        graph: MemoryGraph,
    ) -> Result<MemoryGraph, SessionError> {
        self.shared.store.memory_replace(name, graph).await?;
        self.memory(name).await
    }

    /// # Errors
    /// When the repository does not exist.
    pub async fn memory_clear(&self, name: &RepositoryName) -> Result<(), SessionError> {
        Ok(self.shared.store.memory_clear(name).await?)
    }
}
