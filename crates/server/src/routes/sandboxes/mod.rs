//! Standalone sandboxes, images, volumes, snapshots and disk usage. The same routes serve HTTP and,
//! without a server, the CLI's own process (`crate::in_process`).

mod disks;
mod files;
mod images;
mod lifecycle;
mod pty;
mod requester;

use harvest_session::Sandboxes;
use tokio_util::sync::CancellationToken;

use super::route::Routes;
use crate::ServerState;

/// The state of these routes: no store and no sessions.
#[derive(Clone)]
pub(crate) struct SandboxState {
    pub(crate) sandboxes: Sandboxes,
    pub(crate) shutdown: CancellationToken,
}

impl From<&ServerState> for SandboxState {
    fn from(server: &ServerState) -> Self {
        Self { sandboxes: server.sandboxes.clone(), shutdown: server.shutdown.clone() }
    }
}

/// Members have standalone sandboxes within their limits; images, volumes and disks are for admins.
pub(crate) fn routes() -> Routes<SandboxState> {
    Routes::merge([
        lifecycle::routes(),
        files::routes(),
        pty::routes(),
        images::routes(),
        disks::routes(),
    ])
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Force {
    #[serde(default)]
    force: bool,
}
