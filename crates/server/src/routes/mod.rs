//! One file per resource. A handler parses the request, calls `Sessions` and builds the response.

mod blobs;
mod events;
mod exec;
mod files;
mod health;
mod prompts;
mod pty;
mod pull_requests;
mod repositories;
mod retention;
mod secrets;
mod sessions;
mod snapshots;
pub(crate) mod standalone;
mod tokens;
mod turns;

use axum::{
    Router,
    http::{Method, StatusCode, Uri},
    middleware::from_fn_with_state,
    routing::{delete, get, post, put},
};

pub(crate) use health::Readiness;

use crate::{ServerState, idempotency, problem::ApiError};

/// The handlers, for the OpenAPI document.
pub(crate) mod handlers {
    pub(crate) use super::{
        blobs::*, events::*, exec::*, files::*, health::*, prompts::*, pty::*, pull_requests::*,
        repositories::*, retention::*, secrets::*, sessions::*, snapshots::*,
        standalone::handlers::*, tokens::*, turns::*,
    };
}

/// Routes that require a token. A test compares them with `openapi.rs`.
pub(crate) fn guarded(state: &ServerState) -> Router<ServerState> {
    idempotent_routes(state)
        .merge(standalone::guarded(state))
        .route("/v1/sessions", get(sessions::session_list))
        .route(
            "/v1/sessions/{session}",
            get(sessions::session_get).delete(sessions::session_delete),
        )
        .route("/v1/sessions/{session}/stop", post(sessions::session_stop))
        .route("/v1/sessions/{session}/pause", post(sessions::session_pause))
        .route("/v1/sessions/{session}/resume", post(sessions::session_resume))
        .route("/v1/sessions/{session}/terminate", post(sessions::session_terminate))
        .route("/v1/sessions/{session}/restore", post(sessions::session_restore))
        .route("/v1/sessions/{session}/archive", post(sessions::session_archive))
        .route("/v1/sessions/{session}/prompts", get(prompts::prompt_list))
        .route(
            "/v1/sessions/{session}/prompts/{prompt}",
            delete(prompts::prompt_cancel).patch(prompts::prompt_move),
        )
        .route("/v1/sessions/{session}/turns", get(turns::turn_list))
        .route("/v1/sessions/{session}/turns/{turn}", get(turns::turn_get))
        .route("/v1/sessions/{session}/snapshots", get(snapshots::snapshot_list))
        .route("/v1/sessions/{session}/snapshots/{snapshot}", put(retention::snapshot_pin))
        .route("/v1/retention", get(retention::retention_get).post(retention::retention_apply))
        .route("/v1/sessions/{session}/events", get(events::event_list))
        .route("/v1/sessions/{session}/blobs/{blob}", get(blobs::blob_get))
        .route("/v1/sessions/{session}/diff", get(turns::diff_get))
        .route("/v1/sessions/{session}/diff/files", get(turns::diff_files))
        .route("/v1/sessions/{session}/diff/machine", get(turns::diff_machine))
        .route("/v1/sessions/{session}/exec", post(exec::exec_run).get(exec::exec_open))
        .route(
            "/v1/sessions/{session}/files",
            get(files::file_get)
                .head(files::file_stat)
                .put(files::file_put)
                .delete(files::file_delete),
        )
        .route("/v1/sessions/{session}/pty", get(pty::pty_open))
        .route("/v1/sessions/{session}/pull", get(pull_requests::pull_request_get))
        .route("/v1/repositories", get(repositories::repository_list))
        .route(
            "/v1/repositories/{name}",
            get(repositories::repository_get).delete(repositories::repository_delete),
        )
        .route("/v1/repositories/{name}/build", post(repositories::repository_build))
        .route("/v1/secrets", get(secrets::secret_list))
        .route("/v1/secrets/{name}", put(secrets::secret_set).delete(secrets::secret_delete))
        .route("/v1/me", get(tokens::me_get))
        .route("/v1/tokens", get(tokens::token_list).post(tokens::token_create))
        .route("/v1/tokens/{token}", delete(tokens::token_delete))
}

/// Routes that create resources and honour `Idempotency-Key`.
fn idempotent_routes(state: &ServerState) -> Router<ServerState> {
    Router::new()
        .route("/v1/sessions", post(sessions::session_create))
        .route("/v1/sessions/{session}/fork", post(sessions::session_fork))
        .route("/v1/sessions/{session}/prompts", post(prompts::prompt_create))
        .route("/v1/repositories", post(repositories::repository_add))
        .merge(standalone::idempotent_routes(state))
        .route_layer(from_fn_with_state(state.clone(), idempotency::idempotent))
}

/// Routes that require no token.
pub(crate) fn open() -> Router<ServerState> {
    Router::new()
        .route("/healthz", get(health::healthz))
        .route("/readyz", get(health::readyz))
        .route("/metrics", get(health::metrics))
        .route("/v1/openapi.json", get(health::openapi))
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
