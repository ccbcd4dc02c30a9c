//! The forge over HTTP: git's smart protocol and the pull requests. Every route requires the
//! repository's token; a missing repository is indistinguishable from a wrong token.

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use base64::{Engine, prelude::BASE64_STANDARD};

use super::{ForgeError, LocalForge, git, http_backend, page};

pub(super) fn router(forge: LocalForge) -> Router {
    Router::new()
        .route("/local/{repository}/info/refs", get(info_refs))
        .route("/local/{repository}/git-upload-pack", post(upload_pack))
        .route("/local/{repository}/git-receive-pack", post(receive_pack))
        .route("/local/{name}/pulls", get(list_pull_requests))
        .route("/local/{name}/pulls/{number}", get(get_pull_request))
        .with_state(forge)
}

async fn info_refs(
    State(forge): State<LocalForge>,
    Path(repository): Path<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Response {
    match query.as_deref() {
        Some(query @ ("service=git-upload-pack" | "service=git-receive-pack")) => {
            serve(&forge, &repository, "info/refs", query, request).await
        }
        // The dumb protocol would serve the repository's files one by one.
        _ => {
            (StatusCode::FORBIDDEN, "only git's smart HTTP protocol is supported\n").into_response()
        }
    }
}

async fn upload_pack(
    State(forge): State<LocalForge>,
    Path(repository): Path<String>,
    request: Request,
) -> Response {
    serve(&forge, &repository, "git-upload-pack", "", request).await
}

async fn receive_pack(
    State(forge): State<LocalForge>,
    Path(repository): Path<String>,
    request: Request,
) -> Response {
    serve(&forge, &repository, "git-receive-pack", "", request).await
}

async fn serve(
    forge: &LocalForge,
    repository: &str,
    endpoint: &str,
    query: &str,
    request: Request,
) -> Response {
    let name = repository.strip_suffix(".git").unwrap_or(repository);
    if let Some(refused) = refusal(forge, name, request.headers()) {
        return refused;
    }
    let folder = match forge.existing_folder(name) {
        Ok(folder) => folder,
        Err(error) => return failure(&error),
    };
    if query == "service=git-upload-pack"
        && let Err(error) = git::choose_default_branch(&folder.join("repository.git")).await
    {
        tracing::warn!(
            name,
            error = &error as &dyn std::error::Error,
            "cannot choose a default branch"
        );
    }
    let (parts, body) = request.into_parts();
    let method = if parts.method == Method::HEAD { Method::GET } else { parts.method };
    let headers = &parts.headers;
    let cgi = http_backend::CgiRequest { folder: &folder, endpoint, method, query, headers };
    match http_backend::run(&forge.shared.http_backend, cgi, body).await {
        Ok(response) => response.map(Body::new),
        Err(error) => {
            tracing::warn!(name, endpoint, %error, "git http-backend failed");
            (StatusCode::INTERNAL_SERVER_ERROR, "git failed\\n").into_response()
        }
    }
}

async fn list_pull_requests(
    State(forge): State<LocalForge>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    if let Some(refused) = refusal(&forge, &name, &headers) {
        return refused;
    }
    match forge.pull_requests(&name).await {
        Ok(pull_requests) => Json(pull_requests).into_response(),
        Err(error) => failure(&error),
    }
}

async fn get_pull_request(
    State(forge): State<LocalForge>,
    Path((name, number)): Path<(String, u64)>,
    headers: HeaderMap,
) -> Response {
    if let Some(refused) = refusal(&forge, &name, &headers) {
        return refused;
    }
    let pull_request = match forge.pull_request(&name, number).await {
        Ok(pull_request) => pull_request,
        Err(error) => return failure(&error),
    };
    let accept =
        headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !accept.contains("text/html") {
        return Json(pull_request).into_response();
    }
    // Fails when a branch has since been deleted; the rest of the page is still useful.
    let stat =
        forge.diff_stat(&name, &pull_request).await.unwrap_or_else(|error| error.to_string());
    let headers = [
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, Html(page::render(&name, &pull_request, &stat))).into_response()
}

// An answer to a request without the repository's token.
fn refusal(forge: &LocalForge, name: &str, headers: &HeaderMap) -> Option<Response> {
    let token = headers.get(header::AUTHORIZATION).and_then(password);
    if token.is_some_and(|token| forge.accepts_token(name, &token)) {
        return None;
    }
    let mut refused =
        (StatusCode::UNAUTHORIZED, "this repository requires its access token\\n").into_response();
    let challenge = HeaderValue::from_static("Basic realm=\"harvest forge\", charset=\"UTF-8\"");
    refused.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    Some(refused)
}

// The token is the password of basic authentication; the user name is ignored.
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
        | ForgeError::NoPullRequest { .. }
        | ForgeError::InvalidName(_) => StatusCode::NOT_FOUND,
        _ => {
            tracing::warn!(error = error as &dyn std::error::Error, "the forge failed");
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    (status, format!("{error}\n")).into_response()
}
