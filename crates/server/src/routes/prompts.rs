//! `/v1/sessions/{session}/prompts`: the queue. A prompt answered with 202 is stored.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{
    PromptId, SessionId,
    api::{CreatePrompt, MovePrompt, Page, Prompt},
};

use crate::{
    ServerState,
    auth::{Authenticated, Caller},
    authorization::{
        self,
        Access::{Change, Read},
    },
    extract::{Body, Path},
    idempotency::{IdempotencyKey, Repeat},
    problem::ApiError,
    routes::route::{Routes, routes},
    validate,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        prompt_list: Read,
        prompt_create: Change.idempotent(Repeat::One),
        prompt_cancel: Change,
        prompt_move: Change,
    ]
}

/// Lists a session's prompts in order: done, running, queued.
#[utoipa::path(get, path = "/v1/sessions/{session}/prompts", tag = "prompts",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Page<Prompt>, description = "The prompts")))]
pub(crate) async fn prompt_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Page<Prompt>>, ApiError> {
    let items = state.sessions.prompts(&session).await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Queues a prompt, or answers the agent's question if it is waiting for an answer.
#[utoipa::path(post, path = "/v1/sessions/{session}/prompts", tag = "prompts", request_body = CreatePrompt,
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 202, body = Prompt, description = "Stored; it runs after the prompts before it")))]
pub(crate) async fn prompt_create(
    State(state): State<ServerState>,
    Caller(caller): Caller,
    Authenticated(token): Authenticated,
    key: IdempotencyKey,
    Path(session): Path<SessionId>,
    Body(body): Body<CreatePrompt>,
) -> Result<(StatusCode, Json<Prompt>), ApiError> {
    validate::author(body.author.as_ref())?;
    authorization::check_author(&token, body.author.as_ref())?;
    Ok((
        StatusCode::ACCEPTED,
        Json(key.scope(&state.sessions).prompt(&session, body, caller).await?),
    ))
}

/// Cancels a queued prompt.
#[utoipa::path(delete, path = "/v1/sessions/{session}/prompts/{prompt}", tag = "prompts",
    params(("session" = SessionId, Path, description = "The session"),
           ("prompt" = PromptId, Path, description = "The prompt")),
    responses((status = 200, body = Prompt, description = "The cancelled prompt with its text")))]
pub(crate) async fn prompt_cancel(
    State(state): State<ServerState>,
    Path((session, prompt)): Path<(SessionId, PromptId)>,
) -> Result<Json<Prompt>, ApiError> {
    Ok(Json(state.sessions.prompt_cancel(&session, &prompt).await?))
}

/// Moves a queued prompt to another position.
#[utoipa::path(patch, path = "/v1/sessions/{session}/prompts/{prompt}", tag = "prompts", request_body = MovePrompt,
    params(("session" = SessionId, Path, description = "The session"),
           ("prompt" = PromptId, Path, description = "The prompt")),
    responses((status = 200, body = Prompt, description = "The prompt at its new position")))]
pub(crate) async fn prompt_move(
    State(state): State<ServerState>,
    Path((session, prompt)): Path<(SessionId, PromptId)>,
    Body(body): Body<MovePrompt>,
) -> Result<Json<Prompt>, ApiError> {
    Ok(Json(state.sessions.prompt_move(&session, &prompt, body.position).await?))
}
