//! Verifications: runs of a repository's check on a commit.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use harvest_proto::{
    SessionId, VerificationId,
    api::{Page, Verification, VerifyRepository},
};

use super::repositories::named;
use crate::{
    ServerState,
    auth::Authenticated,
    authorization::Access::{Change, Create, Read},
    extract::{OptionalBody, Path, Query},
    idempotency::Repeat,
    problem::{ApiError, JsonResult},
    routes::route::{Routes, page, routes},
    stream,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        repository_verify: Create.idempotent(Repeat::One),
        verification_list: Read,
        verification_get: Read,
        session_verify: Change.idempotent(Repeat::Page),
    ]
}

/// The query of a verification.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VerificationQuery {
    #[serde(default)]
    follow: bool,
}

/// Runs the repository's check on a branch, a commit or a pull request, in a sandbox of its own.
#[utoipa::path(post, path = "/v1/repositories/{owner}/{name}/verify", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    request_body = Option<VerifyRepository>,
    responses((status = 202, body = Verification,
        description = "The check waits for its turn")))]
async fn repository_verify(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path((owner, name)): Path<(String, String)>,
    OptionalBody(order): OptionalBody<VerifyRepository>,
) -> Result<Response, ApiError> {
    let started = state.repositories.verify(&named(&owner, &name)?, order, &token.user).await?;
    let (repository, id) = (&started.repository, &started.id);
    let location = format!("/v1/repositories/{repository}/verifications/{id}");
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(started)).into_response())
}

/// Lists the verifications of a repository that are kept, newest first.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/verifications", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = Page<Verification>, description = "The verifications")))]
async fn verification_list(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> JsonResult<Page<Verification>> {
    Ok(page(state.repositories.verifications(&named(&owner, &name)?).await?))
}

/// Returns a verification, or with `follow` one JSON object per line each time it changes, until it
/// has ended.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/verifications/{verification}",
    tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name"),
           ("verification" = VerificationId, Path, description = "Id of the verification"),
           ("follow" = Option<bool>, Query,
            description = "Send JSON lines (`application/x-ndjson`) until it has ended")),
    responses((status = 200, description = "The verification",
        content((Verification = "application/json"), (Verification = "application/x-ndjson")))))]
async fn verification_get(
    State(state): State<ServerState>,
    Path((owner, name, id)): Path<(String, String, VerificationId)>,
    Query(query): Query<VerificationQuery>,
) -> Result<Response, ApiError> {
    let (repositories, name) = (&state.repositories, named(&owner, &name)?);
    if query.follow {
        let states = repositories.verification_follow(&name, &id).await?;
        return Ok(stream::lines(states, state.shutdown));
    }
    Ok(Json(repositories.verification(&name, &id).await?).into_response())
}

/// Checks again what the session has pushed. The results are evidence of the session.
#[utoipa::path(post, path = "/v1/sessions/{session}/verify", tag = "pull requests",
    responses((status = 202, body = Page<Verification>,
        description = "One verification for each repository with a push")))]
async fn session_verify(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Response, ApiError> {
    let started = state.repositories.verify_session(&session).await?;
    Ok((StatusCode::ACCEPTED, page(started)).into_response())
}
