//! `/v1/sessions`: create, list, read and control sessions.

use std::collections::BTreeMap;

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::{
    RepositoryRef, SessionId, SnapshotId,
    api::{
        CreateSession, ForkSession, Page, Problem, RestoreSession, Session, SessionState,
        SyncedSession,
    },
    event::CheckoutSync,
};
use harvest_session::{RestorePoint, SessionFilter, SessionKey};
use serde::Serialize;

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::{
        self,
        Access::{Change, Create, Read},
    },
    extract::{self, Body, OptionalBody, Path, Query},
    idempotency::{IdempotencyKey, Repeat},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, created, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        session_list: Read,
        session_counts: Read,
        session_create: Create.idempotent(Repeat::One).taking_images(),
        session_get: Read,
        session_delete: Change,
        session_stop: Change,
        session_pause: Change,
        session_resume: Change,
        session_terminate: Change,
        session_restore: Change,
        session_sync: Change,
        session_archive: Change,
        // A fork contains all files of the sandbox and the session's environment variables.
        session_fork: Change.idempotent(Repeat::Page),
    ]
}

/// The query of the session list.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    cursor: Option<String>,
    limit: Option<u32>,
    state: Option<SessionState>,
    archived: Option<bool>,
    id: Option<String>,
    repository: Option<RepositoryRef>,
    q: Option<String>,
    key: Option<String>,
}

/// Lists sessions, newest first.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions",
    params(("state" = Option<SessionState>, Query, description = "Only sessions in this state"),
           ("archived" = Option<bool>, Query, description = "Only archived sessions, or only others"),
           ("id" = Option<String>, Query, description = "Only sessions whose id begins with this text"),
           ("repository" = Option<String>, Query, description = "Only sessions on this repository: `OWNER/NAME`, or `NAME` if only one has it"),
           ("q" = Option<String>, Query, description = "Only sessions whose title contains this text"),
           ("key" = Option<String>, Query, description = "Only the session that you created with this key"),
           ("cursor" = Option<String>, Query, description = "`next_cursor` of the previous page", min_length = 1),
           ("limit" = Option<u32>, Query, description = "1 to 200; 50 by default",
            minimum = 1, maximum = 200)),
    responses((status = 200, body = Page<Session>, description = "A page of sessions"),
        (status = 404, body = Problem, content_type = "application/problem+json",
            description = "No repository has this name"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "More than one repository has this name")))]
async fn session_list(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Query(query): Query<ListQuery>,
) -> JsonResult<Page<Session>> {
    let ListQuery { cursor, limit, state: shown, archived, id, repository, q, key } = query;
    let limit = extract::limit(limit, 50, 200)?;
    if [&q, &key, &id].into_iter().flatten().any(|text| text.contains('\0')) {
        return Err(ApiError::invalid("invalid_query", "the query contains a NUL character"));
    }
    let repository = match repository {
        Some(repository) => Some(state.repositories.resolve(&repository).await?),
        None => None,
    };
    let key = key.map(|text| SessionKey { owner: token.user.email, text });
    let filter = SessionFilter { state: shown, archived, id_prefix: id, repository, title: q, key };
    Ok(Json(state.sessions.find(&filter, cursor.as_deref(), limit).await?))
}

/// Counts sessions by state. States without sessions are left out.
#[utoipa::path(get, path = "/v1/sessions/counts", tag = "sessions",
    responses((status = 200, body = BTreeMap<String, u64>, description = "The number of sessions in each state")))]
async fn session_counts(State(state): State<ServerState>) -> JsonResult<BTreeMap<String, u64>> {
    Ok(Json(state.sessions.counts().await?))
}

/// The response to the creation of a session.
pub(crate) fn session_created(session: &Session) -> Response {
    created(&path_of(session), session)
}

/// The response to a fork.
pub(crate) fn forks_created(forks: Vec<Session>) -> Response {
    let first = forks.first().map(path_of).unwrap_or_default();
    created(&first, &page(forks).0)
}

fn path_of(session: &Session) -> String {
    format!("/v1/sessions/{}", session.id)
}

/// Creates a session; with a prompt, work starts at once.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = CreateSession,
    responses((status = 201, body = Session, description = "Created; the prompt is stored")))]
async fn session_create(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    key: IdempotencyKey,
    Body(body): Body<CreateSession>,
) -> Result<Response, ApiError> {
    let user = authorization::user_of(&token, body.author.as_ref())?;
    authorization::check_snapshot(&state.sessions, &token, body.from.as_ref()).await?;
    Ok(session_created(&key.scope(&state.sessions).create(body, user).await?))
}

/// Returns a session.
#[utoipa::path(get, path = "/v1/sessions/{session}", tag = "sessions",
    responses((status = 200, body = Session, description = "The session")))]
async fn session_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Session> {
    Ok(Json(state.sessions.get(&session).await?))
}

/// Deletes a session with its sandbox, snapshots and history.
#[utoipa::path(delete, path = "/v1/sessions/{session}", tag = "sessions",
    responses((status = 204, description = "Deleted")))]
async fn session_delete(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<StatusCode, ApiError> {
    state.sessions.delete(&session).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops the current turn; the sandbox and the queue are kept.
#[utoipa::path(post, path = "/v1/sessions/{session}/stop", tag = "sessions",
    responses((status = 200, body = Session, description = "The session; its turn has stopped or is stopping")))]
async fn session_stop(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Session> {
    state.sessions.stop(&session).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// A paused session.
#[derive(Serialize, utoipa::ToSchema)]
pub(crate) struct Paused {
    session: Session,
    /// The snapshot it resumes from.
    snapshot_id: SnapshotId,
}

/// Saves a snapshot of the sandbox and stops it.
#[utoipa::path(post, path = "/v1/sessions/{session}/pause", tag = "sessions",
    responses((status = 200, body = Paused, description = "Paused; the snapshot is saved")))]
async fn session_pause(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Paused> {
    let snapshot_id = state.sessions.pause(&session).await?;
    Ok(Json(Paused { session: state.sessions.get(&session).await?, snapshot_id }))
}

/// Starts a sandbox from the session's latest state.
#[utoipa::path(post, path = "/v1/sessions/{session}/resume", tag = "sessions",
    responses((status = 202, body = Session, description = "Starting; follow the session's events")))]
async fn session_resume(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<(StatusCode, Json<Session>), ApiError> {
    state.sessions.resume(&session).await?;
    Ok((StatusCode::ACCEPTED, Json(state.sessions.get(&session).await?)))
}

/// Stops the session's sandbox immediately, even during a turn; its disk is saved.
#[utoipa::path(post, path = "/v1/sessions/{session}/terminate", tag = "sessions",
    responses((status = 200, body = Session, description = "The session, without a sandbox")))]
async fn session_terminate(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Session> {
    state.sessions.terminate(&session).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Restores the session's files and conversation as they were after a turn or in a snapshot, in
/// place. A running turn is stopped and the current state is saved first; later turns can still be
/// restored.
#[utoipa::path(post, path = "/v1/sessions/{session}/restore", tag = "sessions", request_body = RestoreSession,
    responses((status = 200, body = Session, description = "The session; it continues from there")))]
async fn session_restore(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Body(body): Body<RestoreSession>,
) -> JsonResult<Session> {
    let point = match (body.turn, body.snapshot_id) {
        (Some(turn), None) => RestorePoint::Turn(turn),
        (None, Some(snapshot)) => RestorePoint::Snapshot(snapshot),
        _ => {
            let detail = "give either `turn` or `snapshot_id`";
            return Err(ApiError::invalid("invalid_restore", detail));
        }
    };
    state.sessions.restore(&session, &point).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Brings the session's checkouts up to date: commits work that is not committed, fetches, and
/// rebases each branch onto its base. A conflict leaves the branch as it was. Prompts wait
/// meanwhile; a paused session is resumed.
#[utoipa::path(post, path = "/v1/sessions/{session}/sync", tag = "sessions",
    responses((status = 200, body = SyncedSession, description = "How the sync of each checkout ended"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "A turn is in progress, or the session has no repository")))]
async fn session_sync(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<SyncedSession> {
    let checkouts = state.sessions.sync(&session).await?;
    let synced = checkouts.iter().all(CheckoutSync::is_current);
    Ok(Json(SyncedSession { session: state.sessions.get(&session).await?, synced, checkouts }))
}

/// Archives a session, which can still be read and forked.
#[utoipa::path(post, path = "/v1/sessions/{session}/archive", tag = "sessions",
    responses((status = 200, body = Session, description = "The session; archived as soon as its disk is saved")))]
async fn session_archive(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Session> {
    state.sessions.archive(&session).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Creates sessions from the end of a turn of this one, with its files and conversation: either all
/// of them or none.
#[utoipa::path(post, path = "/v1/sessions/{session}/fork", tag = "sessions", request_body = Option<ForkSession>,
    responses((status = 201, body = Page<Session>, description = "The new sessions")))]
async fn session_fork(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    key: IdempotencyKey,
    Path(session): Path<SessionId>,
    OptionalBody(body): OptionalBody<ForkSession>,
) -> Result<Response, ApiError> {
    let user = authorization::user_of(&token, body.author.as_ref())?;
    Ok(forks_created(key.scope(&state.sessions).fork(&session, body, user).await?))
}
