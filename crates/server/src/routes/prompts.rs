//! `/v1/sessions/{session}/prompts`: the queue. A prompt answered 202 is on disk.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{
    PromptId, SessionId,
    api::{CreatePrompt, MovePrompt, Page, Prompt},
};

use crate::{
    ServerState,
    auth::{Caller, Holder},
    extract::{Body, Path},
    idempotency::Once,
    policy,
    problem::ApiError,
    valid,
};

/// Lists a session's prompts in their order: done, running, waiting.
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

/// Queues a prompt, or answers the agent's question when it waits for one.
#[utoipa::path(post, path = "/v1/sessions/{session}/prompts", tag = "prompts", request_body = CreatePrompt,
    params(("session" = SessionId, Path, description = "The session"),
           ("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 202, body = Prompt, description = "On disk; it runs when its turn comes")))]
pub(crate) async fn prompt_create(
    State(state): State<ServerState>,
    Caller(caller): Caller,
    Holder(token): Holder,
    once: Once,
    Path(session): Path<SessionId>,
    Body(body): Body<CreatePrompt>,
) -> Result<(StatusCode, Json<Prompt>), ApiError> {
    valid::author(body.author.as_ref())?;
    policy::speaks_for(&token, body.author.as_ref())?;
    Ok((StatusCode::ACCEPTED, Json(once.of(&state.sessions).prompt(&session, body, caller).await?)))
}

/// Takes a waiting prompt out of the queue.
#[utoipa::path(delete, path = "/v1/sessions/{session}/prompts/{prompt}", tag = "prompts",
    params(("session" = SessionId, Path, description = "The session"),
           ("prompt" = PromptId, Path, description = "The prompt")),
    responses((status = 200, body = Prompt, description = "Cancelled; its text is given back")))]
pub(crate) async fn prompt_cancel(
    State(state): State<ServerState>,
    Path((session, prompt)): Path<(SessionId, PromptId)>,
) -> Result<Json<Prompt>, ApiError> {
    Ok(Json(state.sessions.prompt_cancel(&session, &prompt).await?))
}

/// Moves a waiting prompt to another place in the queue.
#[utoipa::path(patch, path = "/v1/sessions/{session}/prompts/{prompt}", tag = "prompts", request_body = MovePrompt,
    params(("session" = SessionId, Path, description = "The session"),
           ("prompt" = PromptId, Path, description = "The prompt")),
    responses((status = 200, body = Prompt, description = "At its new place")))]
pub(crate) async fn prompt_move(
    State(state): State<ServerState>,
    Path((session, prompt)): Path<(SessionId, PromptId)>,
    Body(body): Body<MovePrompt>,
) -> Result<Json<Prompt>, ApiError> {
    Ok(Json(state.sessions.prompt_move(&session, &prompt, body.position).await?))
}
