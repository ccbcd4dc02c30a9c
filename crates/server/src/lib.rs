//! The HTTP API: routes, SSE, WebSockets, authentication, OpenAPI. It translates between HTTP and
//! `session` and makes no decisions; it never sees the store or a provider.
//!
//! Order of the middleware: `session_keys::resolve`, `problem::assign_request_id`,
//! `metrics::count`, `problem::render` (errors become problem documents),
//! `host_check::require_host`, `auth::require_token` (with the rules of `authorization`),
//! `detach_writes`, `idempotency::idempotent`, then a handler under `routes/`. The last three
//! follow from the rule that each route declares (`routes/route.rs`).
#![forbid(unsafe_code)]

mod auth;
mod authorization;
mod command_body;
mod connections;
mod extract;
mod host_check;
mod idempotency;
pub mod in_process;
mod mcp;
mod metrics;
mod openapi;
mod problem;
mod rate_limit;
mod route_path;
mod routes;
mod session_keys;
mod stream;
mod validate;
mod websocket;

use std::{io, sync::Arc};

use axum::{Router, extract::DefaultBodyLimit, middleware, response::Response};
use harvest_session::{Accounts, Repositories, Sandboxes, ServerParts, Sessions};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use connections::{ConnectionLimits, TokenAccepted};

pub use openapi::document;

/// The shared state of the routes.
#[derive(Clone)]
pub struct ServerState {
    accounts: Accounts,
    repositories: Repositories,
    sandboxes: Sandboxes,
    sessions: Sessions,
    hosts: Arc<host_check::AllowedHosts>,
    forge: Router,
    revocations: Arc<auth::Revocations>,
    rate_limits: Arc<rate_limit::RateLimits>,
    request_metrics: Arc<metrics::RequestMetrics>,
    readiness: Arc<routes::Readiness>,
    limits: Limits,
    in_flight: idempotency::InFlight,
    shutdown: CancellationToken,
}

impl ServerState {
    /// A server that accepts loopback names, IP addresses and `hosts` in the `Host` header, and
    /// closes its streams when `shutdown` is cancelled.
    #[must_use]
    pub fn new(parts: ServerParts, hosts: &[String], shutdown: CancellationToken) -> Self {
        let ServerParts { accounts, repositories, sandboxes, sessions } = parts;
        let hosts = Arc::new(host_check::AllowedHosts::new(hosts));
        let limits = Limits::default();
        let rate_limits = Arc::new(rate_limit::RateLimits::new(limits.requests_per_second));
        Self {
            accounts,
            repositories,
            sandboxes,
            sessions,
            hosts,
            forge: Router::new(),
            revocations: Arc::new(auth::Revocations::new(shutdown.clone())),
            rate_limits,
            request_metrics: Arc::default(),
            readiness: Arc::default(),
            limits,
            in_flight: idempotency::InFlight::default(),
            shutdown,
        }
    }

    /// Replaces the default limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        let rate_limits = Arc::new(rate_limit::RateLimits::new(limits.requests_per_second));
        Self { rate_limits, limits, ..self }
    }

    /// Serves the local forge below `/forge`, with the forge's own errors, because its client is
    /// git.
    #[must_use]
    pub fn with_forge(self, forge: Router) -> Self {
        Self { forge, ..self }
    }
}

/// The load a server accepts.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests per second for each token, with a burst of four times as many; a tenth for each
    /// address without a token. 0 disables the limit.
    pub requests_per_second: u32,
    /// Concurrent connections; a further one replaces one without a token, or waits.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { requests_per_second: 500, connections: 1000 }
    }
}

/// Every route with its middleware.
pub fn router(state: ServerState) -> Router {
    let api = routes::router(&state)
        .fallback(routes::no_such_route)
        .method_not_allowed_fallback(routes::method_not_allowed)
        .layer(DefaultBodyLimit::max(extract::MAX_BODY_BYTES))
        .with_state(state.clone());
    let app = Router::new()
        .merge(mcp::routes(&api, &state.shutdown))
        .nest("/forge", state.forge.clone().layer(middleware::map_response(mark_accepted)))
        .merge(api)
        .layer(middleware::from_fn_with_state(state.clone(), host_check::require_host))
        .layer(middleware::from_fn_with_state(true, problem::render))
        .layer(middleware::from_fn_with_state(state.clone(), metrics::count))
        .layer(middleware::from_fn(problem::assign_request_id));
    // Around the router: a layer inside would see the path after it was routed.
    Router::new()
        .fallback_service(app)
        .layer(middleware::from_fn_with_state(state, session_keys::resolve))
}

/// The forge checks its tokens itself, and every success of it had a valid one.
async fn mark_accepted(mut response: Response) -> Response {
    if response.status().is_success() {
        response.extensions_mut().insert(TokenAccepted);
    }
    response
}

/// Serves requests on `listener` until the state's `shutdown` is cancelled and the last response is
/// sent.
///
/// # Errors
/// When the listener's address cannot be read.
pub async fn serve(listener: TcpListener, state: ServerState) -> io::Result<()> {
    tracing::info!(address = %listener.local_addr()?, "listening");
    let (shutdown, limits) =
        (state.shutdown.clone(), ConnectionLimits::new(state.limits.connections));
    connections::serve(listener, router(state), limits, shutdown).await;
    Ok(())
}
