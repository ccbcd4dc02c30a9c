//! Is it there, is it ready, how is it, what can it do: the routes that ask for no token, or not always.

use std::{net::IpAddr, time::Duration};

use axum::{
    Json,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use harvest_proto::api::Role;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{ServerState, auth, limit, metrics, problem::ApiError};

/// How old an answer may be: to look writes to the disk, and anyone may ask.
const FRESH: Duration = Duration::from_secs(1);

/// What was found when somebody last asked whether the server is ready.
#[derive(Debug, Default)]
pub(crate) struct Readiness(tokio::sync::Mutex<Option<(Instant, Vec<String>)>>);

/// Says that the process answers.
#[utoipa::path(get, path = "/healthz", tag = "health",
    responses((status = 200, body = Value, description = "It does")))]
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({ "ok": true, "version": env!("CARGO_PKG_VERSION") }))
}

/// Says that work can be taken: the store can be written, the machine answers, nothing is shutting down.
#[utoipa::path(get, path = "/readyz", tag = "health",
    responses((status = 200, body = Value, description = "Ready"),
        (status = 503, body = harvest_proto::api::Problem, content_type = "application/problem+json",
            description = "Not now; `detail` says why")))]
pub(crate) async fn readyz(State(state): State<ServerState>) -> Result<Json<Value>, ApiError> {
    let unavailable = |code, detail: String| {
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, detail).retry_after(5))
    };
    if state.shutdown.is_cancelled() {
        return unavailable("shutting_down", "the server is shutting down".into());
    }
    let mut last = state.readiness.0.lock().await;
    let troubles = match &*last {
        Some((at, troubles)) if at.elapsed() < FRESH => troubles.clone(),
        _ => {
            let troubles = state.sessions.troubles().await;
            *last = Some((Instant::now(), troubles.clone()));
            troubles
        }
    };
    match troubles.is_empty() {
        true => Ok(Json(json!({ "ready": true }))),
        false => unavailable("not_ready", troubles.join("; ")),
    }
}

/// Counts of everything, as Prometheus reads them. For whoever is on this machine, and for admins.
#[utoipa::path(get, path = "/metrics", tag = "health",
    responses((status = 200, body = String, content_type = "text/plain; version=0.0.4",
        description = "The text format, version 0.0.4")))]
pub(crate) async fn metrics(
    State(state): State<ServerState>,
    request: Request,
) -> Result<Response, ApiError> {
    if !is_local(&request) {
        let token = match auth::bearer(request.headers()).map(str::to_owned) {
            Some(value) => state.sessions.token_check(&value).await?,
            None => None,
        };
        if token.is_none_or(|token| token.role != Role::Admin) {
            let detail = "the counts are for this machine and for admins";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", detail)
                .hint("send `authorization: Bearer TOKEN` with a token of an admin"));
        }
    }
    let page = metrics::page(&state.sessions.vitals().await?, &state.answers);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}

/// From this machine itself, and not through a proxy on it that speaks for others.
fn is_local(request: &Request) -> bool {
    let passed_on = ["forwarded", "x-forwarded-for", "via"];
    limit::peer(request).is_some_and(|peer| IpAddr::to_canonical(&peer.ip()).is_loopback())
        && !passed_on.iter().any(|name| request.headers().contains_key(*name))
}

/// Describes every route.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "health",
    responses((status = 200, body = Value, description = "This document, OpenAPI 3.1")))]
pub(crate) async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi::document())
}
