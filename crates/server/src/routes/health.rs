//! Liveness, readiness, metrics and the OpenAPI document: routes that need no token (metrics only
//! locally).

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

use crate::{
    ServerState, auth,
    authorization::Access::Open,
    metrics,
    problem::{ApiError, JsonResult},
    rate_limit,
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        healthz: Open,
        readyz: Open,
        metrics: Open,
        openapi: Open,
    ]
}

// Readiness results are cached: the check writes to the disk, and the route needs no token.
const CACHE_TIME: Duration = Duration::from_secs(1);

/// The cached result of the last readiness check.
#[derive(Debug, Default)]
pub(crate) struct Readiness(tokio::sync::Mutex<Option<(Instant, Vec<String>)>>);

/// Liveness: the process responds.
#[utoipa::path(get, path = "/healthz", tag = "health",
    responses((status = 200, body = Value, description = "Alive")))]
async fn healthz() -> Json<Value> {
    Json(json!({ "ok": true, "version": env!("CARGO_PKG_VERSION") }))
}

/// Readiness: the store is writable, the sandbox provider responds and the server is not shutting
/// down.
#[utoipa::path(get, path = "/readyz", tag = "health",
    responses((status = 200, body = Value, description = "Ready"),
        (status = 503, body = harvest_proto::api::Problem, content_type = "application/problem+json",
            description = "Not ready; `detail` says why")))]
async fn readyz(State(state): State<ServerState>) -> JsonResult<Value> {
    let unavailable = |code, detail: String| {
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, detail).retry_after(5))
    };
    if state.shutdown.is_cancelled() {
        return unavailable("shutting_down", "the server is shutting down".into());
    }
    let mut last = state.readiness.0.lock().await;
    let problems = match &*last {
        Some((at, problems)) if at.elapsed() < CACHE_TIME => problems.clone(),
        _ => {
            let problems = state.sessions.readiness_problems().await;
            *last = Some((Instant::now(), problems.clone()));
            problems
        }
    };
    match problems.is_empty() {
        true => Ok(Json(json!({ "ready": true }))),
        false => unavailable("not_ready", problems.join("; ")),
    }
}

/// Metrics in the Prometheus text format, for local requests and admins.
#[utoipa::path(get, path = "/metrics", tag = "health",
    responses((status = 200, body = String, content_type = "text/plain; version=0.0.4",
        description = "The text format, version 0.0.4")))]
async fn metrics(State(state): State<ServerState>, request: Request) -> Result<Response, ApiError> {
    if !is_local(&request) {
        let token = match auth::bearer(request.headers()).map(str::to_owned) {
            Some(value) => state.accounts.token_check(&value).await?,
            None => None,
        };
        if token.is_none_or(|token| token.role != Role::Admin) {
            let detail = "metrics are for local requests and admins";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", detail)
                .hint("send `authorization: Bearer TOKEN` with an admin's token"));
        }
    }
    let page = metrics::page(&state.sessions.stats().await?, &state.request_metrics);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response())
}

/// Whether the request comes from this machine and not through a proxy on it.
fn is_local(request: &Request) -> bool {
    let proxy_headers = ["forwarded", "x-forwarded-for", "via"];
    rate_limit::peer(request).is_some_and(|peer| IpAddr::to_canonical(&peer.ip()).is_loopback())
        && !proxy_headers.iter().any(|name| request.headers().contains_key(*name))
}

/// Returns the OpenAPI description of every route.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "health",
    responses((status = 200, body = Value, description = "This document, OpenAPI 3.1")))]
async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi::document())
}
