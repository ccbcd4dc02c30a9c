//! One file per resource: its `routes()` and its handlers. A handler parses the request, calls
//! `Accounts`, `Repositories`, `Sandboxes` or `Sessions` and builds the response.

mod artifacts;
mod blobs;
mod budgets;
mod bundles;
mod events;
mod exec;
mod files;
mod health;
mod hooks;
mod memory;
mod models;
mod network;
mod pool;
mod prompts;
mod pty;
mod pull_requests;
mod repositories;
mod retention;
pub(crate) mod route;
pub(crate) mod sandboxes;
mod schedule;
mod secrets;
pub(crate) mod sessions;
mod snapshots;
mod tokens;
mod turns;
mod users;
mod verifications;

use axum::{
    Router,
    http::{Method, StatusCode, Uri},
};

pub(crate) use files::percent_encode;
pub(crate) use health::Readiness;
use route::Routes;
use sandboxes::SandboxState;

use crate::{ServerState, problem::ApiError};

/// The routes of sessions and of the server itself.
pub(crate) fn routes() -> Routes<ServerState> {
    Routes::merge([
        sessions::routes(),
        prompts::routes(),
        turns::routes(),
        bundles::routes(),
        snapshots::routes(),
        retention::routes(),
        events::routes(),
        artifacts::routes(),
        blobs::routes(),
        exec::routes(),
        files::routes(),
        pty::routes(),
        pull_requests::routes(),
        hooks::routes(),
        repositories::routes(),
        verifications::routes(),
        schedule::routes(),
        pool::routes(),
        memory::routes(),
        network::routes(),
        budgets::routes(),
        models::routes(),
        secrets::routes(),
        tokens::routes(),
        users::routes(),
        health::routes(),
    ])
}

/// All routes with the middleware of their rules.
pub(crate) fn router(state: &ServerState) -> Router<ServerState> {
    let sandboxes = sandboxes::routes().with_state(&SandboxState::from(state));
    Routes::merge([routes(), sandboxes]).guarded(state)
}

pub(crate) async fn no_such_route(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "no_such_route", format!("no route for {}", uri.path()))
        .hint("/v1/openapi.json lists all routes")
}

pub(crate) async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let detail = format!("{method} is not allowed on {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
        .hint("/v1/openapi.json lists all routes")
}
