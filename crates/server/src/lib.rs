//! HTTP, SSE, auth, OpenAPI. Translates; decides nothing: what a session does is `session`'s, and this
//! crate never sees the store or a provider.
//!
//! The way of a request: `problem::name_request` names it, `auth::require_host` looks where it was sent,
//! `auth::require_token` who sent it, `idempotency::once` whether it came before; a file under `routes/`
//! reads it and calls `Sessions`; `problem::finish` writes errors down.
#![forbid(unsafe_code)]

mod auth;
mod extract;
pub mod here;
mod idempotency;
mod openapi;
mod problem;
mod routes;
mod stdin;
mod stream;
mod valid;

use std::{io, sync::Arc};

use axum::{Router, extract::DefaultBodyLimit, middleware, serve::ListenerExt};
use harvest_session::{Sessions, machines::Commands};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use openapi::document;

/// What the routes need.
#[derive(Clone)]
pub struct ServerState {
    sessions: Sessions,
    hosts: Arc<auth::Hosts>,
    forge: Router,
    machines: Option<Commands>,
    shutdown: CancellationToken,
}

impl ServerState {
    /// For a server that answers to the loopback names, to any address and to `hosts`, and that ends
    /// its streams when `shutdown` is cancelled.
    #[must_use]
    pub fn new(sessions: Sessions, hosts: &[String], shutdown: CancellationToken) -> Self {
        let hosts = Arc::new(auth::Hosts::new(hosts));
        Self { sessions, hosts, forge: Router::new(), machines: None, shutdown }
    }

    /// Serves the local forge below `/forge`. It keeps its own errors and limits: git speaks to it.
    #[must_use]
    pub fn with_forge(self, forge: Router) -> Self {
        Self { forge, ..self }
    }

    /// Offers the machines of this host: sandboxes, images and volumes without a session.
    #[must_use]
    pub fn with_machines(self, machines: Commands) -> Self {
        Self { machines: Some(machines), ..self }
    }
}

/// Every route, with everything in front of it.
pub fn router(state: ServerState) -> Router {
    let guarded = routes::guarded(&state)
        .route_layer(middleware::from_fn_with_state(state.clone(), auth::require_token));
    let api = guarded
        .merge(routes::open())
        .fallback(routes::no_such_route)
        .method_not_allowed_fallback(routes::no_such_method)
        .layer(DefaultBodyLimit::max(extract::MAX_BODY_BYTES))
        .with_state(state.clone());
    Router::new()
        .nest("/forge", state.forge.clone())
        .merge(api)
        .layer(middleware::from_fn_with_state(state, auth::require_host))
        .layer(middleware::from_fn(problem::finish))
        .layer(middleware::from_fn(problem::name_request))
}

/// Answers requests on `listener` until the state's `shutdown` is cancelled and the last answer is out.
///
/// # Errors
/// When the listener breaks.
pub async fn serve(listener: TcpListener, state: ServerState) -> io::Result<()> {
    let shutdown = state.shutdown.clone();
    // Events are small and wanted at once; without this the kernel collects them for 40 ms.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, router(state)).with_graceful_shutdown(shutdown.cancelled_owned()).await
}
