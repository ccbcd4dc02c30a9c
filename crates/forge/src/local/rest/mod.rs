//! The part of GitHub's REST API that clients of pull requests use, below `/api/v3` as on GitHub
//! Enterprise Server. Answers come from git and from the forge's records when they are asked for.
//! Tests check every answer against GitHub's OpenAPI description.

mod apps;
mod client;
mod comments;
mod commits;
mod contents;
mod error;
mod graphql;
mod hooks;
mod in_process;
mod json;
mod meta;
pub(super) mod payloads;
mod pulls;
mod references;
mod repositories;
mod statuses;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{DefaultBodyLimit, Request},
    http::{HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, delete, get, patch, post, put},
};
use error::RestError;
use harvest_proto::SessionId;
use ring::digest::{SHA256, digest};

use super::LocalForge;
pub(super) use comments::comment_page;
pub(super) use graphql::graphql;
pub(super) use in_process::read;

/// The path of the API below the forge's URL.
pub(super) const PATH: &str = "/api/v3";
/// The path of GraphQL.
pub(super) const GRAPHQL_PATH: &str = "/api/graphql";
// Texts have at most 64 KiB; JSON escapes make them longer.
const MAX_BODY_BYTES: usize = 1 << 20;

pub(super) fn router() -> Router<LocalForge> {
    Router::new()
        .route("/", get(meta::root))
        .route("/meta", get(meta::meta))
        .route("/rate_limit", get(meta::rate_limit))
        .route("/user", get(meta::user))
        .merge(app_routes())
        .merge(repository_routes())
        .merge(pull_request_routes())
        .fallback(not_found)
        .method_not_allowed_fallback(not_found)
        .layer(middleware::from_fn(add_entity_tag))
        .layer(middleware::from_fn(add_headers))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
}

/// The route of the API's own path, with a slash at its end.
pub(super) fn root() -> MethodRouter<LocalForge> {
    get(meta::root)
}

fn app_routes() -> Router<LocalForge> {
    Router::new()
        .route("/app", get(apps::app))
        .route("/app/installations", get(apps::installations))
        .route("/app/installations/{id}", get(apps::installation))
        .route("/app/installations/{id}/access_tokens", post(apps::create_token))
        .route("/installation/repositories", get(apps::repositories))
        .route("/installation/token", delete(apps::revoke_token))
        .route("/repos/{owner}/{repo}/installation", get(apps::repository_installation))
}

fn repository_routes() -> Router<LocalForge> {
    Router::new()
        .route("/repos/{owner}/{repo}", get(repositories::get))
        .route("/repos/{owner}/{repo}/branches", get(references::branches))
        .route("/repos/{owner}/{repo}/branches/{*branch}", get(references::branch))
        .route("/repos/{owner}/{repo}/commits", get(commits::list_all))
        // A reference may have slashes, so the rest of the path is taken apart by hand.
        .route("/repos/{owner}/{repo}/commits/{*rest}", get(commits::below))
        .route("/repos/{owner}/{repo}/compare/{*basehead}", get(commits::compare))
        .route("/repos/{owner}/{repo}/contents", get(contents::root))
        .route("/repos/{owner}/{repo}/contents/", get(contents::root))
        .route("/repos/{owner}/{repo}/contents/{*path}", get(contents::get))
        .route("/repos/{owner}/{repo}/git/ref/{*name}", get(references::get))
        .route("/repos/{owner}/{repo}/git/matching-refs/{*name}", get(references::matching))
        .route("/repos/{owner}/{repo}/git/refs", post(references::create))
        .route(
            "/repos/{owner}/{repo}/git/refs/{*name}",
            patch(references::update).delete(references::delete),
        )
        .route("/repos/{owner}/{repo}/statuses/{sha}", post(statuses::create))
        .route("/repos/{owner}/{repo}/actions/runs", get(statuses::workflow_runs))
        .route("/repos/{owner}/{repo}/hooks", get(hooks::list).post(hooks::create))
        .route("/repos/{owner}/{repo}/hooks/{id}", get(hooks::get).delete(hooks::delete))
        .route("/repos/{owner}/{repo}/hooks/{id}/pings", post(hooks::ping))
}

fn pull_request_routes() -> Router<LocalForge> {
    Router::new()
        .route("/repos/{owner}/{repo}/pulls", get(pulls::list).post(pulls::create))
        .route("/repos/{owner}/{repo}/pulls/{number}", get(pulls::get).patch(pulls::update))
        .route("/repos/{owner}/{repo}/pulls/{number}/files", get(pulls::files))
        .route("/repos/{owner}/{repo}/pulls/{number}/commits", get(pulls::commits))
        .route("/repos/{owner}/{repo}/pulls/{number}/reviews", get(pulls::reviews))
        .route(
            "/repos/{owner}/{repo}/pulls/{number}/merge",
            put(pulls::merge).get(pulls::is_merged),
        )
        .route(
            "/repos/{owner}/{repo}/issues/{number}/comments",
            get(comments::list).post(comments::create),
        )
        .route(
            "/repos/{owner}/{repo}/issues/comments/{id}",
            get(comments::get).patch(comments::update).delete(comments::delete),
        )
}

async fn not_found() -> RestError {
    RestError::not_found()
}

/// Adds an entity tag to what was read. A client that has it already gets 304 without the body.
async fn add_entity_tag(request: Request, next: Next) -> Response {
    let is_read = request.method() == Method::GET;
    let known = request.headers().get(header::IF_NONE_MATCH).cloned();
    let response = next.run(request).await;
    if !is_read || response.status() != StatusCode::OK {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    // Every answer is complete in memory.
    let Ok(bytes) = to_bytes(body, usize::MAX).await else {
        return RestError::not_found().into_response();
    };
    let hash: String =
        digest(&SHA256, &bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let Ok(tag) = HeaderValue::from_str(&format!("W/\"{hash}\"")) else {
        return Response::from_parts(parts, Body::from(bytes));
    };
    let unchanged = known.as_ref() == Some(&tag);
    parts.headers.insert(header::ETAG, tag);
    if !unchanged {
        return Response::from_parts(parts, Body::from(bytes));
    }
    parts.status = StatusCode::NOT_MODIFIED;
    parts.headers.remove(header::CONTENT_TYPE);
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::empty())
}

async fn add_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    let set = |headers: &mut axum::http::HeaderMap, name, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    set(headers, "x-github-request-id", SessionId::random().part());
    set(headers, "x-github-media-type", "github.v3; format=json");
    set(headers, "x-github-enterprise-version", meta::VERSION);
    set(headers, "x-content-type-options", "nosniff");
    response
}
