//! `/hooks/github`: takes webhooks. They have no bearer token; their signature is checked on the
//! bytes of the body before anything of it is read.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode},
};
use harvest_proto::api::Problem;
use harvest_session::{WebhookError, WebhookHeaders, WebhookRefusal};

use crate::{
    ServerState,
    authorization::Access::Open,
    extract,
    problem::ApiError,
    routes::route::{Routes, routes},
};

// GitHub sends up to 25 MB; the events that Harvest uses have a few dozen kilobytes.
const MAX_BYTES: usize = 2 * 1024 * 1024;

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        webhook_github: Open,
    ]
}

/// Takes a webhook of GitHub, signed with the secret that the server has as
/// `GITHUB_WEBHOOK_SECRET`. A push to the base of a repository is looked at, and the state of a
/// pull request is read, at once. Each delivery is taken once; unknown events are accepted and not
/// used.
#[utoipa::path(post, path = "/hooks/github", tag = "webhooks",
    request_body(content = serde_json::Value, content_type = "application/json",
        description = "The payload"),
    params(("X-Hub-Signature-256" = Option<String>, Header, description = "The signature"),
        ("X-GitHub-Event" = Option<String>, Header, description = "The event"),
        ("X-GitHub-Delivery" = Option<String>, Header, description = "Id of the delivery")),
    responses((status = 202, description = "Taken"),
        (status = 401, body = Problem, content_type = "application/problem+json",
            description = "The signature is missing or wrong")))]
async fn webhook_github(
    State(state): State<ServerState>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let headers = request.headers().clone();
    let headers = webhook_headers(&headers);
    // Without a signature the body is not even received.
    if headers.signature.is_none() {
        return Err(refused(WebhookError::NoSignature));
    }
    let body = extract::read_up_to(request, MAX_BYTES).await?;
    match state.repositories.receive_webhook(headers, &body).await {
        Ok(_) => Ok(StatusCode::ACCEPTED),
        Err(WebhookRefusal::Refused(error)) => Err(refused(error)),
        Err(WebhookRefusal::Failed(error)) => Err(error.into()),
    }
}

fn webhook_headers(headers: &HeaderMap) -> WebhookHeaders<'_> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    WebhookHeaders {
        signature: text("x-hub-signature-256"),
        event: text("x-github-event"),
        delivery: text("x-github-delivery"),
    }
}

fn refused(error: WebhookError) -> ApiError {
    let (status, code, hint) = match error {
        WebhookError::NotSetUp => (
            StatusCode::NOT_FOUND,
            "webhooks_not_set_up",
            "start the server with GITHUB_WEBHOOK_SECRET, the secret of the webhook",
        ),
        WebhookError::NoSignature | WebhookError::WrongSignature => (
            StatusCode::UNAUTHORIZED,
            "invalid_signature",
            "give the webhook the secret that the server has as GITHUB_WEBHOOK_SECRET",
        ),
        WebhookError::NoEvent | WebhookError::NoPayload => (
            StatusCode::BAD_REQUEST,
            "invalid_webhook",
            "choose the content type `application/json` in the webhook's settings",
        ),
    };
    ApiError::new(status, code, error.to_string()).hint(hint)
}
