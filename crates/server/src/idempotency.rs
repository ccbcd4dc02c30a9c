//! `Idempotency-Key`: a repeated request creates one resource and gets the first response again.
//!
//! Keys and responses are stored, so a retry after a server restart works too. The work continues
//! when the client disconnects (`detach_writes`). Sessions and prompts are stored in one
//! transaction with their key: when the server dies before it stores the response, a retry returns
//! the resource in its current state. For sandboxes the planned ids are stored before creation, so
//! a retry finds or creates the sandboxes with these ids.

use std::{
    collections::HashSet,
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Json,
    body::{Body, to_bytes},
    extract::{FromRequestParts, Request, State},
    http::{HeaderValue, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use harvest_session::{Claim, CreatedUnderKey, Sessions};
use serde::{Deserialize, Serialize};

use crate::{
    ServerState,
    auth::Authenticated,
    extract,
    problem::{ApiError, error_chain},
    route_path::RoutePath,
    routes::sessions::{forks_created, session_created},
};

// Longer than any UUID.
pub(crate) const MAX_KEY_BYTES: usize = 128;

#[derive(Serialize, Deserialize)]
struct StoredResponse {
    status: u16,
    location: Option<String>,
    body: String,
}

/// The key of the current request.
#[derive(Debug, Clone, Default)]
pub(crate) struct IdempotencyKey(Option<String>);

impl IdempotencyKey {
    /// A view of `sessions` that stores created resources under the key.
    pub(crate) fn scope(&self, sessions: &Sessions) -> Sessions {
        sessions.with_idempotency_key(self.0.as_deref())
    }

    pub(crate) fn key(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

const HEADER: &str = "idempotency-key";

/// The response to a repeated request whose first server died after it had stored the new ids and
/// before it stored the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// The created resource in its current state.
    One,
    /// A page of the created resources.
    Page,
    /// The handler runs again and creates the planned resources that do not exist yet.
    Planned,
}

/// Ids planned by an earlier request with the same key, whose server died before it responded.
#[derive(Debug, Clone, Default)]
pub(crate) struct PlannedIds(pub(crate) Vec<String>);

/// The keys of requests in progress on this server.
#[derive(Debug, Clone, Default)]
pub(crate) struct InFlight(Arc<Mutex<HashSet<String>>>);

/// Removes the key on drop.
struct InFlightGuard(InFlight, String);

impl InFlight {
    fn begin(&self, key: &str) -> Option<InFlightGuard> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        keys.insert(key.to_owned()).then(|| InFlightGuard(self.clone(), key.to_owned()))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// Executes a request once per key.
pub(crate) async fn idempotent(
    State((state, repeat)): State<(ServerState, Repeat)>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if !request.headers().contains_key(HEADER) {
        return Ok(next.run(request).await);
    }
    let (mut parts, body) = request.into_parts();
    let body = extract::read(Request::from_parts(parts.clone(), body), &state).await?;
    let key = key(&parts)?;
    // Checked before the claim: a planned sandbox may be in creation right now.
    let _guard = state.in_flight.begin(&key).ok_or_else(in_progress)?;
    let planned = match state.sessions.idempotency_claim(&key, &fingerprint(&parts, &body)).await? {
        Claim::New => Vec::new(),
        Claim::Done { response } => return replay(&response),
        Claim::CreatedIds { ids } if repeat == Repeat::Planned => ids,
        Claim::CreatedIds { ids } => return response_for(&state, repeat, &parts, &ids).await,
        Claim::InFlight => return Err(in_progress()),
        Claim::Mismatch => {
            let detail = "this key was already used for a different request";
            return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "key_reused", detail)
                .hint("send a new Idempotency-Key with each new request"));
        }
    };
    parts.extensions.insert(PlannedIds(planned));
    parts.extensions.insert(IdempotencyKey(Some(key.clone())));
    let response = next.run(Request::from_parts(parts, Body::from(body))).await;
    store_response(&state, &key, response).await
}

fn in_progress() -> ApiError {
    let detail = "the first request with this key is still in progress";
    ApiError::new(StatusCode::CONFLICT, "in_progress", detail).hint("retry in a moment")
}

/// Stores the response of a success. After a failure the key may be used again.
async fn store_response(
    state: &ServerState,
    key: &str,
    response: Response,
) -> Result<Response, ApiError> {
    if !response.status().is_success() {
        if let Err(error) = state.sessions.idempotency_release(key).await {
            tracing::warn!(error = error_chain(&error), "cannot release an idempotency key");
        }
        return Ok(response);
    }
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.map_err(|_| {
        let detail = "the response could not be read for storing";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
    })?;
    let location = parts.headers.get(header::LOCATION);
    let stored = StoredResponse {
        status: parts.status.as_u16(),
        location: location.and_then(|value| Some(value.to_str().ok()?.to_owned())),
        body: String::from_utf8_lossy(&bytes).into_owned(),
    };
    let answer = serde_json::to_string(&stored).expect("a number and a text are JSON");
    // The resource exists, so the request succeeds; a retry is answered by the stored ids.
    if let Err(error) = state.sessions.idempotency_finish(key, &answer).await {
        tracing::warn!(
            error = error_chain(&error),
            "cannot store a response for its idempotency key"
        );
    }
    Ok(Response::from_parts(parts, Body::from(bytes)))
}

fn replay(answer: &str) -> Result<Response, ApiError> {
    let unreadable = || {
        let detail = "the stored response of this key cannot be read";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
    };
    let stored: StoredResponse = serde_json::from_str(answer).map_err(|_| unreadable())?;
    let status = StatusCode::from_u16(stored.status).map_err(|_| unreadable())?;
    let mut response = (status, stored.body).into_response();
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(location) = stored.location.and_then(|text| text.parse().ok()) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(replayed(response))
}

/// The response of the first request, with the created resources in their current state.
async fn response_for(
    state: &ServerState,
    repeat: Repeat,
    parts: &Parts,
    ids: &[String],
) -> Result<Response, ApiError> {
    let path = RoutePath::new(&parts.extensions, &parts.uri);
    let session = path.parameter("{session}").and_then(|part| part.parse().ok());
    let response = match state.sessions.created_under_key(session.as_ref(), ids).await? {
        CreatedUnderKey::Prompt(prompt) => (StatusCode::ACCEPTED, Json(prompt)).into_response(),
        CreatedUnderKey::Sessions(items) if repeat == Repeat::Page => forks_created(items),
        CreatedUnderKey::Sessions(items) => match items.first() {
            Some(session) => session_created(session),
            None => (StatusCode::CREATED, Json(None::<()>)).into_response(),
        },
    };
    Ok(replayed(response))
}

/// Marks a response whose resource was created by an earlier request.
pub(crate) fn replayed(mut response: Response) -> Response {
    response.headers_mut().insert("idempotency-replayed", HeaderValue::from_static("true"));
    response
}

/// The stored key: prefixed by the user, so that the keys of different users never collide.
fn key(parts: &Parts) -> Result<String, ApiError> {
    let given = parts.headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or("");
    if !is_valid(given) {
        let detail = format!(
            "`Idempotency-Key` must be 1 to {MAX_KEY_BYTES} printable ASCII characters, without spaces"
        );
        return Err(ApiError::invalid("invalid_key", detail));
    }
    let user =
        parts.extensions.get::<Authenticated>().map_or("", |token| token.0.user.email.as_str());
    Ok(format!("{user} {given}"))
}

fn is_valid(key: &str) -> bool {
    (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Distinguishes requests; the separators make the parts unambiguous.
fn fingerprint(parts: &Parts, body: &[u8]) -> Vec<u8> {
    [parts.method.as_str().as_bytes(), b" ", parts.uri.path().as_bytes(), b"\n", body].concat()
}
