//! `/v1/sessions`: create, look, and the verbs that change what a session does.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{
    SessionId, SnapshotId,
    api::{CreateSession, ForkSession, Page, RestoreSession, Session, SessionState},
};
use harvest_session::SessionFilter;
use serde::Serialize;

use crate::{
    ServerState,
    auth::{Caller, Holder},
    extract::{Body, OptionalBody, Paging, Path, Query},
    idempotency::Once,
    policy,
    problem::ApiError,
    valid,
};

/// Which sessions to list.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Which {
    #[serde(default)]
    cursor: Option<String>,
    #[serde(default)]
    limit: Option<u32>,
    #[serde(default)]
    state: Option<SessionState>,
    #[serde(default)]
    repository: Option<String>,
    #[serde(default)]
    q: Option<String>,
    #[serde(default)]
    key: Option<String>,
}

/// Lists sessions, newest first.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions",
    params(("state" = Option<SessionState>, Query, description = "Only those in this state"),
           ("repository" = Option<String>, Query, description = "Only those that work on this repository"),
           ("q" = Option<String>, Query, description = "Only those with this in their title"),
           ("key" = Option<String>, Query, description = "Only the one with this key"),
           ("cursor" = Option<String>, Query, description = "Where the last page ended", min_length = 1),
           ("limit" = Option<u32>, Query, description = "1 to 200; 50 when absent",
            minimum = 1, maximum = 200)),
    responses((status = 200, body = Page<Session>, description = "A page of sessions")))]
pub(crate) async fn session_list(
    State(state): State<ServerState>,
    Query(which): Query<Which>,
) -> Result<Json<Page<Session>>, ApiError> {
    let Which { cursor, limit, state: shown, repository, q, key } = which;
    let paging = Paging { cursor, limit };
    if [&repository, &q, &key].into_iter().flatten().any(|text| text.contains('\0')) {
        return Err(ApiError::invalid(
            "invalid_query",
            "no session has a zero byte in any of its texts",
        ));
    }
    let filter = SessionFilter { state: shown, repository, title: q, key };
    Ok(Json(state.sessions.find(&filter, paging.cursor.as_deref(), paging.limit()?).await?))
}

/// Creates a session; with a prompt, work begins at once.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = CreateSession,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = Session, description = "Created; its prompt is on disk")))]
pub(crate) async fn session_create(
    State(state): State<ServerState>,
    Caller(caller): Caller,
    Holder(token): Holder,
    once: Once,
    Body(body): Body<CreateSession>,
) -> Result<(StatusCode, Json<Session>), ApiError> {
    valid::author(body.author.as_ref())?;
    policy::speaks_for(&token, body.author.as_ref())?;
    policy::starts_from(&state.sessions, &token, body.from.as_ref()).await?;
    for repository in &body.repositories {
        policy::names_host(&token, repository.url.as_ref())?;
    }
    Ok((StatusCode::CREATED, Json(once.of(&state.sessions).create(body, caller).await?)))
}

/// Shows a session as it stands.
#[utoipa::path(get, path = "/v1/sessions/{session}", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Session, description = "The session")))]
pub(crate) async fn session_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Session>, ApiError> {
    Ok(Json(state.sessions.get(&session).await?))
}

/// Deletes a session with its sandbox, its snapshots and its history.
#[utoipa::path(delete, path = "/v1/sessions/{session}", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 204, description = "Gone")))]
pub(crate) async fn session_delete(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<StatusCode, ApiError> {
    state.sessions.delete(&session).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops the turn in progress; the sandbox and the queue stay.
#[utoipa::path(post, path = "/v1/sessions/{session}/stop", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Session, description = "The session; its turn has ended or is ending")))]
pub(crate) async fn session_stop(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Session>, ApiError> {
    state.sessions.stop(&session).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// What a pause kept.
#[derive(Serialize, utoipa::ToSchema)]
pub(crate) struct Paused {
    /// The session as it stands.
    session: Session,
    /// Where it goes on from.
    snapshot: SnapshotId,
}

/// Keeps the machine on disk and ends its sandbox.
#[utoipa::path(post, path = "/v1/sessions/{session}/pause", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Paused, description = "Paused; the snapshot is on disk")))]
pub(crate) async fn session_pause(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Paused>, ApiError> {
    let snapshot = state.sessions.pause(&session).await?;
    Ok(Json(Paused { session: state.sessions.get(&session).await?, snapshot }))
}

/// Starts a sandbox from where the session was left.
#[utoipa::path(post, path = "/v1/sessions/{session}/resume", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 202, body = Session, description = "Starting; follow its events")))]
pub(crate) async fn session_resume(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<(StatusCode, Json<Session>), ApiError> {
    state.sessions.resume(&session).await?;
    Ok((StatusCode::ACCEPTED, Json(state.sessions.get(&session).await?)))
}

/// Ends the session's sandbox now, whatever it is doing; its disk is kept.
#[utoipa::path(post, path = "/v1/sessions/{session}/terminate", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Session, description = "The session, without a sandbox")))]
pub(crate) async fn session_terminate(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Session>, ApiError> {
    state.sessions.terminate(&session).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Goes back to the end of a turn, in place: files and conversation. A turn in progress is stopped, the
/// present state is kept, and later turns can be gone back to as well.
#[utoipa::path(post, path = "/v1/sessions/{session}/restore", tag = "sessions", request_body = RestoreSession,
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Session, description = "The session; it goes on from that turn")))]
pub(crate) async fn session_restore(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Body(body): Body<RestoreSession>,
) -> Result<Json<Session>, ApiError> {
    state.sessions.restore(&session, body.turn).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Puts a session away; it can be read and forked still.
#[utoipa::path(post, path = "/v1/sessions/{session}/archive", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Session, description = "The session; archived as soon as its machine is kept")))]
pub(crate) async fn session_archive(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Session>, ApiError> {
    state.sessions.archive(&session).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Makes sessions that begin where a turn of this one ended: files and conversation. All of them, or none.
#[utoipa::path(post, path = "/v1/sessions/{session}/fork", tag = "sessions", request_body = Option<ForkSession>,
    params(("session" = SessionId, Path, description = "The session to go on from"),
           ("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = Page<Session>, description = "The new sessions")))]
pub(crate) async fn session_fork(
    State(state): State<ServerState>,
    Caller(caller): Caller,
    once: Once,
    Path(session): Path<SessionId>,
    OptionalBody(body): OptionalBody<ForkSession>,
) -> Result<(StatusCode, Json<Page<Session>>), ApiError> {
    let items = once.of(&state.sessions).fork(&session, body, caller).await?;
    Ok((StatusCode::CREATED, Json(Page { items, next_cursor: None })))
}
