//! The forge over HTTP: git's smart protocol and the pull requests. Every route requires the
//! repository's token; a missing repository is indistinguishable from a wrong token.

use axum::{
    Json, Router,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::api::PullRequest;

use super::{ForgeError, LocalForge, disk, git, http_backend, page};

pub(super) fn router(forge: LocalForge) -> Router {
    Router::new()
        .route("/local/{repository}/info/refs", get(info_refs))
        .route("/local/{repository}/git-upload-pack", service("git-upload-pack"))
        .route("/local/{repository}/git-receive-pack", service("git-receive-pack"))
        .route("/local/{name}/pr", get(list_pull_requests))
        .route("/local/{name}/pr/{number}", get(get_pull_request))
        .with_state(forge)
}

async fn info_refs(
    State(forge): State<LocalForge>,
    Path(repository): Path<String>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Response, Response> {
    match query.as_deref() {
        Some(query @ ("service=git-upload-pack" | "service=git-receive-pack")) => {
            serve(&forge, &repository, "info/refs", query, request).await
        }
        // The dumb protocol would serve the repository's files one by one.
        _ => {
            let message = "only git's smart HTTP protocol is supported\n";
            Err((StatusCode::FORBIDDEN, message).into_response())
        }
    }
}

fn service(endpoint: &'static str) -> MethodRouter<LocalForge> {
    post(move |State(forge), Path(repository): Path<String>, request| async move {
        serve(&forge, &repository, endpoint, "", request).await
    })
}

async fn serve(
    forge: &LocalForge,
    repository: &str,
    endpoint: &str,
    query: &str,
    request: Request,
) -> Result<Response, Response> {
    let name = repository.strip_suffix(".git").unwrap_or(repository);
    authorize(forge, name, request.headers())?;
    let folder = forge.existing_folder(name)?;
    if (endpoint == "git-receive-pack" || query == "service=git-receive-pack")
        && !disk::has_room(&folder)
    {
        let message =
            "the disk of the local forge is almost full; `harvest df` shows what uses it\n";
        return Err((StatusCode::INSUFFICIENT_STORAGE, message).into_response());
    }
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
    http_backend::run(&forge.shared.http_backend, cgi, body).await.map_err(|error| {
        tracing::warn!(name, endpoint, %error, "git http-backend failed");
        (StatusCode::INTERNAL_SERVER_ERROR, "git failed\n").into_response()
    })
}

async fn list_pull_requests(
    State(forge): State<LocalForge>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Vec<PullRequest>>, Response> {
    authorize(&forge, &name, &headers)?;
    Ok(Json(forge.pull_requests(&name).await?))
}

async fn get_pull_request(
    State(forge): State<LocalForge>,
    Path((name, number)): Path<(String, u64)>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    authorize(&forge, &name, &headers)?;
    let pull_request = forge.pull_request(&name, number).await?;
    let accept =
        headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !accept.contains("text/html") {
        return Ok(Json(pull_request).into_response());
    }
    // Fails when a branch has since been deleted; the rest of the page is still useful.
    let stat =
        forge.diff_stat(&name, &pull_request).await.unwrap_or_else(|error| error.to_string());
    let headers = [
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    Ok((headers, Html(page::render(&name, &pull_request, &stat))).into_response())
}

/// The request lacks the repository's token.
struct Unauthorized;

fn authorize(forge: &LocalForge, name: &str, headers: &HeaderMap) -> Result<(), Unauthorized> {
    let token = headers.get(header::AUTHORIZATION).and_then(password);
    token.filter(|token| forge.accepts_token(name, token)).map(drop).ok_or(Unauthorized)
}

impl From<Unauthorized> for Response {
    fn from(_: Unauthorized) -> Self {
        let challenge =
            [(header::WWW_AUTHENTICATE, "Basic realm=\"harvest forge\", charset=\"UTF-8\"")];
        let message = "this repository requires its access token\n";
        (StatusCode::UNAUTHORIZED, challenge, message).into_response()
    }
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

impl From<ForgeError> for Response {
    fn from(error: ForgeError) -> Self {
        let status = match error {
            ForgeError::NoRepository { .. }
            | ForgeError::NoPullRequest { .. }
            | ForgeError::InvalidName(_) => StatusCode::NOT_FOUND,
            _ => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the forge failed");
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        (status, format!("{error}\n")).into_response()
    }
}
