//! Standalone sandboxes, images, volumes, snapshots and disk usage. The same routes serve HTTP and,
//! without a server, the CLI's own process (`crate::in_process`).

mod disks;
mod files;
mod images;
mod pty;
mod requester;
mod sandboxes;

use std::borrow::Cow;

use axum::http::StatusCode;
use harvest_proto::Hint;
use harvest_session::{
    decide::Limit,
    standalone::{HostError, SandboxHost, StandaloneSandboxes},
};
use tokio_util::sync::CancellationToken;

use super::route::Routes;
use crate::{ServerState, problem::ApiError};

// `Retry-After` in seconds when a slot is about to become free.
const RETRY_SOON: u64 = 1;

// `Retry-After` in seconds when all slots are in use.
const RETRY_LATER: u64 = 15;

/// The state of these routes: no store and no sessions.
#[derive(Clone)]
pub(crate) struct StandaloneState {
    pub(crate) sandboxes: StandaloneSandboxes,
    pub(crate) shutdown: CancellationToken,
}

impl StandaloneState {
    /// `None` if the server has no standalone sandboxes.
    pub(super) fn of(server: &ServerState) -> Option<Self> {
        let (sandboxes, shutdown) = (server.standalone.clone()?, server.shutdown.clone());
        Some(Self { sandboxes, shutdown })
    }

    fn host(&self) -> &dyn SandboxHost {
        self.sandboxes.host()
    }
}

/// Standalone sandboxes can exhaust the host, so these routes are for admins.
pub(crate) fn routes() -> Routes<StandaloneState> {
    Routes::merge([
        sandboxes::routes(),
        files::routes(),
        pty::routes(),
        images::routes(),
        disks::routes(),
    ])
}

impl From<HostError> for ApiError {
    fn from(error: HostError) -> Self {
        let status = match &error {
            HostError::Missing { .. } => StatusCode::NOT_FOUND,
            // A full disk is neither the client's error nor a failure of the server.
            HostError::Conflict { .. } | HostError::NoSpace { .. } => StatusCode::CONFLICT,
            HostError::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            HostError::LimitReached { limit: Limit::Closed, .. } => StatusCode::SERVICE_UNAVAILABLE,
            HostError::LimitReached { .. } => StatusCode::TOO_MANY_REQUESTS,
            HostError::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let retry_after = match &error {
            HostError::LimitReached { releasing, limit, .. } => {
                Some(if *releasing || *limit == Limit::Closed { RETRY_SOON } else { RETRY_LATER })
            }
            _ => None,
        };
        let hint = error.hint().map(Cow::into_owned);
        let error = Self::new(status, error.code(), crate::problem::error_chain(&error));
        Self { hint, retry_after, ..error }
    }
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Force {
    #[serde(default)]
    force: bool,
}
