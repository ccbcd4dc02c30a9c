//! Standalone sandboxes, images, volumes, snapshots and disk usage. The same routes serve HTTP and,
//! without a server, the CLI's own process (`crate::in_process`).

mod disks;
mod files;
mod images;
mod pty;
mod requester;
mod sandboxes;

use axum::{
    Router,
    http::StatusCode,
    routing::{delete, get, post},
};
use harvest_session::{
    decide::Limit,
    standalone::{HostError, SandboxHost, StandaloneSandboxes},
};
use tokio_util::sync::CancellationToken;

use crate::{ServerState, problem::ApiError};

// `Retry-After` in seconds when a slot is about to become free.
const RETRY_SOON: u64 = 1;

// `Retry-After` in seconds when all slots are in use.
const RETRY_LATER: u64 = 15;

/// The handlers, for the OpenAPI document.
pub(crate) mod handlers {
    pub(crate) use super::{disks::*, files::*, images::*, pty::*, sandboxes::*};
}

/// The state of these routes: no store and no sessions.
#[derive(Clone)]
pub(crate) struct StandaloneState {
    pub(crate) sandboxes: StandaloneSandboxes,
    pub(crate) shutdown: CancellationToken,
}

impl StandaloneState {
    fn host(&self) -> &dyn SandboxHost {
        self.sandboxes.host()
    }
}

/// The routes without idempotency keys; none if the server has no standalone sandboxes.
pub(super) fn guarded(state: &ServerState) -> Router<ServerState> {
    standalone(state).map_or_else(Router::new, |state| others().with_state(state))
}

/// The routes that honour `Idempotency-Key`.
pub(super) fn idempotent_routes(state: &ServerState) -> Router<ServerState> {
    standalone(state).map_or_else(Router::new, |state| idempotent().with_state(state))
}

fn standalone(state: &ServerState) -> Option<StandaloneState> {
    let (sandboxes, shutdown) = (state.standalone.clone()?, state.shutdown.clone());
    Some(StandaloneState { sandboxes, shutdown })
}

/// All routes, for in-process use.
pub(crate) fn all() -> Router<StandaloneState> {
    idempotent().merge(others())
}

fn idempotent() -> Router<StandaloneState> {
    Router::new()
        .route("/v1/sandboxes", post(sandboxes::sandbox_create))
        .route("/v1/sandboxes/{sandbox}/snapshot", post(sandboxes::sandbox_snapshot))
        .route("/v1/sandboxes/{sandbox}/fork", post(sandboxes::sandbox_fork))
        .route("/v1/sandboxes/{sandbox}/restore", post(sandboxes::sandbox_restore))
        .route("/v1/volumes", post(disks::volume_create))
}

fn others() -> Router<StandaloneState> {
    Router::new()
        .route("/v1/sandboxes", get(sandboxes::sandbox_list))
        .route(
            "/v1/sandboxes/{sandbox}",
            get(sandboxes::sandbox_get).delete(sandboxes::sandbox_delete),
        )
        .route("/v1/sandboxes/{sandbox}/exec", post(sandboxes::sandbox_exec))
        .route("/v1/sandboxes/{sandbox}/pty", get(pty::sandbox_pty_open))
        .route(
            "/v1/sandboxes/{sandbox}/files",
            get(files::sandbox_file_get)
                .head(files::sandbox_file_stat)
                .put(files::sandbox_file_put)
                .delete(files::sandbox_file_delete),
        )
        .route("/v1/sandboxes/{sandbox}/stop", post(sandboxes::sandbox_stop))
        .route("/v1/sandboxes/{sandbox}/start", post(sandboxes::sandbox_start))
        .route("/v1/exec", post(sandboxes::exec_once))
        .route("/v1/images", get(images::image_list).post(images::image_create))
        .route(
            "/v1/images/{name}",
            get(images::image_get).put(images::image_import).delete(images::image_delete),
        )
        .route("/v1/images/{name}/usage", get(images::image_usage))
        .route("/v1/volumes", get(disks::volume_list))
        .route("/v1/volumes/{name}", delete(disks::volume_delete))
        .route("/v1/snapshots", get(disks::stored_snapshot_list))
        .route("/v1/snapshots/{snapshot}", delete(disks::stored_snapshot_delete))
        .route("/v1/df", get(disks::disk_usage))
        .route("/v1/gc", post(disks::collect_garbage))
        .route("/v1/doctor", get(disks::doctor))
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
        let hint = error.hint().map(str::to_owned);
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
