//! Artifacts of sessions, for users.

use std::fs::File;

use harvest_proto::{
    SessionId,
    api::{Artifact, check_artifact_name},
};

use super::Sessions;
use crate::error::SessionError;

impl Sessions {
    /// The files that a session's agents handed over, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn artifacts(&self, session: &SessionId) -> Result<Vec<Artifact>, SessionError> {
        let all = self.shared.store.artifact_list(session).await?;
        self.exists_if_empty(session, all).await
    }

    /// An artifact and its content.
    ///
    /// # Errors
    /// When there is no such artifact.
    pub async fn artifact(
        &self,
        session: &SessionId,
        name: &str,
    ) -> Result<(Artifact, File), SessionError> {
        if check_artifact_name(name).is_err() {
            return Err(SessionError::missing("artifact with such a name"));
        }
        let artifact = self.shared.store.artifact_get(session, name).await?;
        let gone = || SessionError::missing(format!("content of artifact `{name}` on this server"));
        let path = self.shared.artifacts.path(&artifact.sha256).ok_or_else(gone)?;
        let file = File::open(path).map_err(|_| gone())?;
        Ok((artifact, file))
    }
}
