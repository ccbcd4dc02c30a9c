//! `/v1/sessions/{session}/prompts`: the queue. A prompt answered with 202 is stored.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use harvest_proto::{
    PromptId, SessionId,
    api::{CreatePrompt, MovePrompt, Page, Prompt},
};

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::{
        self,
        Access::{Change, Read},
    },
    extract::{Body, Path},
    idempotency::{IdempotencyKey, Repeat},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        prompt_list: Read,
        prompt_create: Change.idempotent(Repeat::One).taking_images(),
        attachment_get: Read,
        prompt_cancel: Change,
        prompt_move: Change,
    ]
}

/// Lists a session's prompts in order: done, running, queued.
#[utoipa::path(get, path = "/v1/sessions/{session}/prompts", tag = "prompts",
    responses((status = 200, body = Page<Prompt>, description = "The prompts")))]
async fn prompt_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Page<Prompt>> {
    Ok(page(state.sessions.prompts(&session).await?))
}

/// Queues a prompt, or answers the agent's question if it is waiting for an answer.
#[utoipa::path(post, path = "/v1/sessions/{session}/prompts", tag = "prompts", request_body = CreatePrompt,
    responses((status = 202, body = Prompt, description = "Stored; it runs after the prompts before it")))]
async fn prompt_create(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    key: IdempotencyKey,
    Path(session): Path<SessionId>,
    Body(body): Body<CreatePrompt>,
) -> Result<(StatusCode, Json<Prompt>), ApiError> {
    let user = authorization::user_of(&token, body.author.as_ref())?;
    let prompt = key.scope(&state.sessions).prompt(&session, body, user).await?;
    Ok((StatusCode::ACCEPTED, Json(prompt)))
}

/// Returns an image of a prompt.
#[utoipa::path(get, path = "/v1/sessions/{session}/prompts/{prompt}/attachments/{number}", tag = "prompts",
    params(("number" = u32, Path, description = "Number of the attachment; the first one is 1")),
    responses((status = 200, description = "The image, with its type",
        content((Vec<u8> = "image/png"), (Vec<u8> = "image/jpeg"), (Vec<u8> = "image/gif"), (Vec<u8> = "image/webp")))))]
async fn attachment_get(
    State(state): State<ServerState>,
    Path((session, prompt, number)): Path<(SessionId, PromptId, u32)>,
) -> Result<Response, ApiError> {
    let (kind, bytes) = state.sessions.attachment(&session, &prompt, number).await?;
    let headers =
        [(header::CONTENT_TYPE, kind.as_str()), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    Ok((headers, bytes).into_response())
}

/// Cancels a queued prompt.
#[utoipa::path(delete, path = "/v1/sessions/{session}/prompts/{prompt}", tag = "prompts",
    responses((status = 200, body = Prompt, description = "The cancelled prompt with its text")))]
async fn prompt_cancel(
    State(state): State<ServerState>,
    Path((session, prompt)): Path<(SessionId, PromptId)>,
) -> JsonResult<Prompt> {
    Ok(Json(state.sessions.prompt_cancel(&session, &prompt).await?))
}

/// Moves a queued prompt to another position.
#[utoipa::path(patch, path = "/v1/sessions/{session}/prompts/{prompt}", tag = "prompts", request_body = MovePrompt,
    responses((status = 200, body = Prompt, description = "The prompt at its new position")))]
async fn prompt_move(
    State(state): State<ServerState>,
    Path((session, prompt)): Path<(SessionId, PromptId)>,
    Body(body): Body<MovePrompt>,
) -> JsonResult<Prompt> {
    Ok(Json(state.sessions.prompt_move(&session, &prompt, body.position).await?))
}
