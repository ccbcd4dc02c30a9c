//! Machines without a session: sandboxes of one's own, images, volumes, snapshots, room. The same routes
//! answer over HTTP and, without a server, inside the process that asks (`crate::here`).

mod asker;
mod disks;
mod files;
mod images;
mod pty;
mod sandboxes;

use axum::{
    Router,
    http::StatusCode,
    routing::{delete, get, post},
};
use harvest_session::{
    decide::Limit,
    machines::{Commands, MachineError, Machines},
};
use tokio_util::sync::CancellationToken;

use crate::{ServerState, problem::ApiError};

/// A place is being given up: what that takes, in seconds.
const SOON: u64 = 1;

/// Somebody has to give one up first.
const LATER: u64 = 15;

/// The handlers, for the table of the OpenAPI page.
pub(crate) mod handlers {
    pub(crate) use super::{disks::*, files::*, images::*, pty::*, sandboxes::*};
}

/// What these routes need; no store and no session.
#[derive(Clone)]
pub(crate) struct Desk {
    pub(crate) commands: Commands,
    pub(crate) shutdown: CancellationToken,
}

impl Desk {
    fn machines(&self) -> &dyn Machines {
        self.commands.machines()
    }
}

/// The routes of a server that has machines to offer.
pub(super) fn guarded(state: &ServerState) -> Router<ServerState> {
    desk(state).map_or_else(Router::new, |desk| others().with_state(desk))
}

/// Those of them that make something: they honour `Idempotency-Key`.
pub(super) fn created_once(state: &ServerState) -> Router<ServerState> {
    desk(state).map_or_else(Router::new, |desk| creating().with_state(desk))
}

fn desk(state: &ServerState) -> Option<Desk> {
    let (commands, shutdown) = (state.machines.clone()?, state.shutdown.clone());
    Some(Desk { commands, shutdown })
}

/// Every route, for who needs no server.
pub(crate) fn all() -> Router<Desk> {
    creating().merge(others())
}

fn creating() -> Router<Desk> {
    Router::new()
        .route("/v1/sandboxes", post(sandboxes::sandbox_create))
        .route("/v1/sandboxes/{sandbox}/snapshot", post(sandboxes::sandbox_snapshot))
        .route("/v1/sandboxes/{sandbox}/fork", post(sandboxes::sandbox_fork))
        .route("/v1/sandboxes/{sandbox}/restore", post(sandboxes::sandbox_restore))
        .route("/v1/volumes", post(disks::volume_create))
}

fn others() -> Router<Desk> {
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
        .route("/v1/images", get(images::image_list).post(images::image_make))
        .route(
            "/v1/images/{name}",
            get(images::image_get).put(images::image_import).delete(images::image_delete),
        )
        .route("/v1/images/{name}/usage", get(images::image_usage))
        .route("/v1/volumes", get(disks::volume_list))
        .route("/v1/volumes/{name}", delete(disks::volume_delete))
        .route("/v1/snapshots", get(disks::machine_snapshot_list))
        .route("/v1/snapshots/{snapshot}", delete(disks::machine_snapshot_delete))
        .route("/v1/df", get(disks::disk_usage))
        .route("/v1/gc", post(disks::collect))
        .route("/v1/doctor", get(disks::doctor))
}

impl From<MachineError> for ApiError {
    fn from(error: MachineError) -> Self {
        let status = match &error {
            MachineError::Missing { .. } => StatusCode::NOT_FOUND,
            // A full disk is nothing the request is to blame for, and nothing that broke.
            MachineError::Conflict { .. } | MachineError::NoRoom { .. } => StatusCode::CONFLICT,
            MachineError::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            MachineError::Full { limit: Limit::Closed, .. } => StatusCode::SERVICE_UNAVAILABLE,
            MachineError::Full { .. } => StatusCode::TOO_MANY_REQUESTS,
            MachineError::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let retry_after = match &error {
            MachineError::Full { soon, limit, .. } => {
                Some(if *soon || *limit == Limit::Closed { SOON } else { LATER })
            }
            _ => None,
        };
        let hint = error.hint().map(str::to_owned);
        let error = Self::new(status, error.code(), crate::problem::words(&error));
        Self { hint, retry_after, ..error }
    }
}

/// Whether to insist.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Insist {
    #[serde(default)]
    force: bool,
}
