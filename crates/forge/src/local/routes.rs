//! The forge over HTTP: git's smart protocol, the pages of pull requests and the REST API. Git and
//! the pages require a token of the repository; a missing repository is indistinguishable from a
//! wrong token.

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use futures_util::StreamExt;
use harvest_proto::{api::PullRequest, repository_name::LOCAL_OWNER};

use super::{
    ForgeError, LocalForge, credentials::token_of, disk, git, http_backend, kept, page,
    permissions::PermissionLevel, rest,
};

pub(super) fn router(forge: LocalForge) -> Router {
    Router::new()
        .route("/local/{repository}/info/refs", get(info_refs))
        .route("/local/{repository}/git-upload-pack", service("git-upload-pack"))
        .route("/local/{repository}/git-receive-pack", service("git-receive-pack"))
        .route("/local/{name}/pr", get(list_pull_requests))
        .route("/local/{name}/pr/{number}", get(get_pull_request))
        .nest(rest::PATH, rest::router())
        // Nesting leaves out the path with a slash at its end, which clients ask for.
        .route(&format!("{}/", rest::PATH), rest::root())
        .route(rest::GRAPHQL_PATH, post(rest::graphql))
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
    let is_push = endpoint == "git-receive-pack" || query == "service=git-receive-pack";
    let level = if is_push { PermissionLevel::Write } else { PermissionLevel::Read };
    authorize(forge, name, request.headers(), ("contents", level))?;
    let folder = forge.existing_folder(name)?;
    if is_push && !disk::has_room(&folder) {
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
    let watch = match endpoint == "git-receive-pack" {
        true => {
            if let Err(error) =
                kept::remove_expired(&folder.join("repository.git"), std::time::SystemTime::now())
            {
                tracing::warn!(name, %error, "cannot remove commits that were kept long enough");
            }
            forge.watch_references(name, LOCAL_OWNER).await
        }
        false => None,
    };
    let (parts, body) = request.into_parts();
    let method = if parts.method == Method::HEAD { Method::GET } else { parts.method };
    let headers = &parts.headers;
    let cgi = http_backend::CgiRequest { folder: &folder, endpoint, method, query, headers };
    let answered = http_backend::run(&forge.shared.http_backend, cgi, body).await;
    let response = answered.map_err(|error| {
        tracing::warn!(name, endpoint, %error, "git http-backend failed");
        (StatusCode::INTERNAL_SERVER_ERROR, "git failed\n").into_response()
    })?;
    // Until git has ended: the body is dropped after its last byte, or when the client is gone.
    Ok(response.map(|body| {
        let body = body.into_data_stream().map(move |chunk| {
            let _watch = &watch;
            chunk
        });
        Body::from_stream(body)
    }))
}

async fn list_pull_requests(
    State(forge): State<LocalForge>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Vec<PullRequest>>, Response> {
    authorize(&forge, &name, &headers, ("pull_requests", PermissionLevel::Read))?;
    Ok(Json(forge.pull_requests(&name).await?))
}

async fn get_pull_request(
    State(forge): State<LocalForge>,
    Path((name, number)): Path<(String, u64)>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    authorize(&forge, &name, &headers, ("pull_requests", PermissionLevel::Read))?;
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

/// Why a request may not use a repository.
enum Refusal {
    Unauthorized,
    /// The token is valid, but lacks the permission.
    Forbidden,
}

fn authorize(
    forge: &LocalForge,
    name: &str,
    headers: &HeaderMap,
    (permission, level): (&str, PermissionLevel),
) -> Result<(), Refusal> {
    let token = token_of(headers).ok_or(Refusal::Unauthorized)?;
    if forge.accepts_token(name, token.expose()) {
        return Ok(());
    }
    let found = forge.installation_token(token.expose()).unwrap_or_else(|error| {
        tracing::warn!(error = &error as &dyn std::error::Error, "cannot read a token's record");
        None
    });
    let (_, rights) = found.ok_or(Refusal::Unauthorized)?;
    if !rights.has_repository(name) || forge.existing_folder(name).is_err() {
        return Err(Refusal::Unauthorized);
    }
    rights.permissions.allow(permission, level).then_some(()).ok_or(Refusal::Forbidden)
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Self {
        if matches!(refusal, Refusal::Forbidden) {
            let message = "the token lacks the permission for this repository\n";
            return (StatusCode::FORBIDDEN, message).into_response();
        }
        let challenge =
            [(header::WWW_AUTHENTICATE, "Basic realm=\"harvest forge\", charset=\"UTF-8\"")];
        let message = "this repository requires its access token\n";
        (StatusCode::UNAUTHORIZED, challenge, message).into_response()
    }
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
