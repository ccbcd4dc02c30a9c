//! The forge over HTTP: git's smart protocol and the pull requests. Everything asks for the repository's
//! token; a repository that is not there looks like one with another token.

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use base64::{Engine, prelude::BASE64_STANDARD};

use super::{Forge, ForgeError, cgi, git, page};

/// The forge's routes, relative to where it is nested.
pub(super) fn router(forge: Forge) -> Router {
    Router::new()
        .route("/{repository}/info/refs", get(info_refs))
        .route("/{repository}/git-upload-pack", post(upload_pack))
        .route("/{repository}/git-receive-pack", post(receive_pack))
        .route("/{name}/pulls", get(pulls))
        .route("/{name}/pulls/{number}", get(pull))
        .with_state(forge)
}

async fn info_refs(
    State(forge): State<Forge>,
    Path(repository): Path<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Response {
    match query.as_deref() {
        Some(query @ ("service=git-upload-pack" | "service=git-receive-pack")) => {
            serve(&forge, &repository, "info/refs", query, request).await
        }
        // The old protocol would serve the repository's files one by one.
        _ => (StatusCode::FORBIDDEN, "this git is too old for this forge\n").into_response(),
    }
}

async fn upload_pack(
    State(forge): State<Forge>,
    Path(repository): Path<String>,
    request: Request,
) -> Response {
    serve(&forge, &repository, "git-upload-pack", "", request).await
}

async fn receive_pack(
    State(forge): State<Forge>,
    Path(repository): Path<String>,
    request: Request,
) -> Response {
    serve(&forge, &repository, "git-receive-pack", "", request).await
}

async fn serve(
    forge: &Forge,
    repository: &str,
    endpoint: &str,
    query: &str,
    request: Request,
) -> Response {
    let name = repository.strip_suffix(".git").unwrap_or(repository);
    if let Some(refused) = refusal(forge, name, request.headers()) {
        return refused;
    }
    let place = match forge.existing(name) {
        Ok(place) => place,
        Err(error) => return failure(&error),
    };
    if query == "service=git-upload-pack"
        && let Err(error) = git::settle_head(&place.join("repository.git")).await
    {
        tracing::warn!(
            name,
            error = &error as &dyn std::error::Error,
            "cannot choose a default branch"
        );
    }
    let (parts, body) = request.into_parts();
    let method = if parts.method == Method::HEAD { Method::GET } else { parts.method };
    let asked = cgi::Request { place: &place, endpoint, method, query, headers: &parts.headers };
    match cgi::run(&forge.shared.backend, asked, body).await {
        Ok(response) => response.map(Body::new),
        Err(error) => {
            tracing::warn!(name, endpoint, %error, "git http-backend could not answer");
            (StatusCode::INTERNAL_SERVER_ERROR, "git could not answer\n").into_response()
        }
    }
}

async fn pulls(
    State(forge): State<Forge>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    if let Some(refused) = refusal(&forge, &name, &headers) {
        return refused;
    }
    match forge.pulls(&name).await {
        Ok(pulls) => Json(pulls).into_response(),
        Err(error) => failure(&error),
    }
}

async fn pull(
    State(forge): State<Forge>,
    Path((name, number)): Path<(String, u64)>,
    headers: HeaderMap,
) -> Response {
    if let Some(refused) = refusal(&forge, &name, &headers) {
        return refused;
    }
    let pull = match forge.pull(&name, number).await {
        Ok(pull) => pull,
        Err(error) => return failure(&error),
    };
    let accept =
        headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !accept.contains("text/html") {
        return Json(pull).into_response();
    }
    // A branch may have been deleted since; the rest of the page is still worth showing.
    let stat = forge.diff_stat(&name, &pull).await.unwrap_or_else(|error| error.to_string());
    let headers = [
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, Html(page::render(&name, &pull, &stat))).into_response()
}

// The refusal, unless the request carries the repository's token.
fn refusal(forge: &Forge, name: &str, headers: &HeaderMap) -> Option<Response> {
    let token = headers.get(header::AUTHORIZATION).and_then(password);
    if token.is_some_and(|token| forge.opens(name, &token)) {
        return None;
    }
    let mut refused =
        (StatusCode::UNAUTHORIZED, "the repository's token is needed\n").into_response();
    let challenge = HeaderValue::from_static("Basic realm=\"harvest forge\", charset=\"UTF-8\"");
    refused.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    Some(refused)
}

// The user's name is free: the token says who it is.
fn password(value: &HeaderValue) -> Option<String> {
    let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64_STANDARD.decode(encoded.trim()).ok()?).ok()?;
    decoded.split_once(':').map(|(_user, password)| password.to_owned())
}

fn failure(error: &ForgeError) -> Response {
    let status = match error {
        ForgeError::NoRepository { .. }
        | ForgeError::NoPull { .. }
        | ForgeError::BadName { .. } => StatusCode::NOT_FOUND,
        _ => {
            tracing::warn!(error = error as &dyn std::error::Error, "the forge failed");
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    (status, format!("{error}\n")).into_response()
}
