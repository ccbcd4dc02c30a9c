//! HTTP, SSE, WebSocket, auth, OpenAPI. Translates; decides nothing: what a session does is `session`'s, and this
//! crate never sees the store or a provider.
//!
//! The way of a request: `problem::name_request` names it, `hosts::require_host` looks where it was sent,
//! `auth::require_token` who sent it and, by `policy`, whether they may; `to_the_end` sees that what was begun is done,
//! `idempotency::once` whether it came before; a file under `routes/` reads it and calls `Sessions`;
//! `problem::finish` writes errors down.
#![forbid(unsafe_code)]

mod auth;
mod connections;
mod extract;
pub mod here;
mod hosts;
mod idempotency;
mod limit;
mod metrics;
mod openapi;
mod policy;
mod problem;
mod routes;
mod socket;
mod stdin;
mod stream;
mod to_the_end;
mod valid;

use std::{io, sync::Arc};

use axum::{Router, extract::DefaultBodyLimit, middleware};
use harvest_session::{Sessions, machines::Commands};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use connections::Bounds;

pub use openapi::document;

/// What the routes need.
#[derive(Clone)]
pub struct ServerState {
    sessions: Sessions,
    hosts: Arc<hosts::Hosts>,
    forge: Router,
    machines: Option<Commands>,
    revoked: Arc<auth::Revocations>,
    rates: Arc<limit::Rates>,
    answers: Arc<metrics::Answers>,
    readiness: Arc<routes::Readiness>,
    limits: Limits,
    under_way: idempotency::UnderWay,
    shutdown: CancellationToken,
}

impl ServerState {
    /// For a server that answers to the loopback names, to any address and to `hosts`, and that ends
    /// its streams when `shutdown` is cancelled.
    #[must_use]
    pub fn new(sessions: Sessions, hosts: &[String], shutdown: CancellationToken) -> Self {
        let hosts = Arc::new(hosts::Hosts::new(hosts));
        let limits = Limits::default();
        let rates = Arc::new(limit::Rates::new(limits.requests_per_second));
        Self {
            sessions,
            hosts,
            forge: Router::new(),
            machines: None,
            revoked: Arc::new(auth::Revocations::new(shutdown.clone())),
            answers: Arc::default(),
            readiness: Arc::default(),
            rates,
            limits,
            under_way: idempotency::UnderWay::default(),
            shutdown,
        }
    }

    /// With these limits in place of the default ones.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { rates: Arc::new(limit::Rates::new(limits.requests_per_second)), limits, ..self }
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

/// How much a server takes.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests of one token in a second; four times as many at once; a tenth of it for each address
    /// without a token. 0 is no limit.
    pub requests_per_second: u32,
    /// Connections at once; more wait.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { requests_per_second: 500, connections: 1000 }
    }
}

/// Every route, with everything in front of it.
pub fn router(state: ServerState) -> Router {
    let guarded = routes::guarded(&state)
        .route_layer(middleware::from_fn(to_the_end::to_the_end))
        .route_layer(middleware::from_fn_with_state(state.clone(), auth::require_token));
    let api = guarded
        .merge(
            routes::open()
                .route_layer(middleware::from_fn_with_state(state.clone(), limit::count_strangers)),
        )
        .fallback(routes::no_such_route)
        .method_not_allowed_fallback(routes::no_such_method)
        .layer(DefaultBodyLimit::max(extract::MAX_BODY_BYTES))
        .with_state(state.clone());
    Router::new()
        .nest("/forge", state.forge.clone())
        .merge(api)
        .layer(middleware::from_fn_with_state(state.clone(), hosts::require_host))
        .layer(middleware::from_fn(problem::finish))
        .layer(middleware::from_fn_with_state(state, metrics::count))
        .layer(middleware::from_fn(problem::name_request))
}

/// Answers requests on `listener` until the state's `shutdown` is cancelled and the last answer is out.
///
/// # Errors
/// When the listener's address cannot be read.
pub async fn serve(listener: TcpListener, state: ServerState) -> io::Result<()> {
    tracing::info!(address = %listener.local_addr()?, "listening");
    let (shutdown, bounds) = (state.shutdown.clone(), Bounds::of(state.limits.connections));
    connections::serve(listener, router(state), bounds, shutdown).await;
    Ok(())
}
