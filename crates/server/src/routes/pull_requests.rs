//! `/v1/sessions/{session}/pr`: the session's pull requests.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{
    SessionId,
    api::{
        CreatePullRequest, MergePullRequest, Page, PullRequest, SessionRepository,
        UpdatePullRequest,
    },
};

use crate::{
    ServerState,
    authorization::Access::{Change, Read},
    extract::{Body, OptionalBody, Path},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, page, routes},
    validate,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        pull_request_get: Read,
        pull_request_create: Change,
        pull_request_update: Change,
        pull_request_merge: Change,
    ]
}

/// Returns the session's pull request with its evidence.
#[utoipa::path(get, path = "/v1/sessions/{session}/pr", tag = "pull requests",
    responses((status = 200, body = PullRequest, description = "The pull request")))]
async fn pull_request_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<PullRequest> {
    let found = state.sessions.get(&session).await?;
    let pull_request = found.repositories.into_iter().find_map(|one| one.pr);
    pull_request.map(Json).ok_or_else(|| {
        let detail = format!("session {session} has no pull request yet");
        ApiError::new(StatusCode::NOT_FOUND, "no_pr", detail).hint(
            "it is opened when the session pushes: `harvest send SESSION \"commit and push\"`",
        )
    })
}

/// Opens pull requests of what the session has pushed, or updates the open ones: one for each
/// repository.
#[utoipa::path(post, path = "/v1/sessions/{session}/pr", tag = "pull requests",
    request_body = CreatePullRequest,
    responses((status = 200, body = Page<SessionRepository>,
        description = "The repositories with their pull requests")))]
async fn pull_request_create(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    OptionalBody(create): OptionalBody<CreatePullRequest>,
) -> JsonResult<Page<SessionRepository>> {
    validate::pull_request(create.title.as_deref(), create.body.as_deref())?;
    Ok(page(state.repositories.pull_request_create(&session, create).await?))
}

/// Changes an open pull request: its title and description, and whether it is a draft.
#[utoipa::path(patch, path = "/v1/sessions/{session}/pr", tag = "pull requests",
    request_body = UpdatePullRequest,
    responses((status = 200, body = SessionRepository,
        description = "The repository with its pull request")))]
async fn pull_request_update(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Body(update): Body<UpdatePullRequest>,
) -> JsonResult<SessionRepository> {
    validate::pull_request(update.title.as_deref(), update.body.as_deref())?;
    Ok(Json(state.repositories.pull_request_update(&session, update).await?))
}

/// Merges a pull request on the local forge. At GitHub, people merge.
#[utoipa::path(post, path = "/v1/sessions/{session}/pr/merge", tag = "pull requests",
    request_body = MergePullRequest,
    responses((status = 200, body = SessionRepository,
        description = "The repository with its merged pull request")))]
async fn pull_request_merge(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    OptionalBody(merge): OptionalBody<MergePullRequest>,
) -> JsonResult<SessionRepository> {
    Ok(Json(state.repositories.pull_request_merge(&session, merge).await?))
}
