//! `Idempotency-Key`: the same request sent twice creates one thing and gets one answer.
//!
//! Keys and answers are kept on disk, so a client that saw its connection die may ask again after a
//! restart of the server just as well. The work goes on when the client goes away, or nobody would know
//! whether it was done. Sessions and prompts are stored together with their key: one that was made by a server
//! which died before it could keep its answer is shown as it stands, and not made again. Of sandboxes the ids are
//! stored before they are made: the same request again finds or makes those of these ids.

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
use bytes::Bytes;
use harvest_proto::api::Page;
use harvest_session::{Claim, Made, Sessions};
use serde::{Deserialize, Serialize};

use crate::{
    ServerState,
    auth::Holder,
    extract,
    problem::{ApiError, words},
};

/// Longer than any UUID; what is longer is a mistake.
const MAX_KEY_BYTES: usize = 128;

/// An answer as it is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    status: u16,
    body: String,
}

/// The key of the request at hand, for what is stored with it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Once(Option<String>);

impl Once {
    /// Sessions that store what they make under the key.
    pub(crate) fn of(&self, sessions: &Sessions) -> Sessions {
        sessions.under(self.0.as_deref())
    }

    /// The key itself.
    pub(crate) fn key(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

/// Where a key stands.
pub(crate) const HEADER: &str = "idempotency-key";

/// What an earlier request with the key of this one was about to make when its server died.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meant(pub(crate) Vec<String>);

/// The keys whose requests this server carries out.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnderWay(Arc<Mutex<HashSet<String>>>);

/// A key in use, until this is dropped.
struct InUse(UnderWay, String);

impl UnderWay {
    fn begin(&self, key: &str) -> Option<InUse> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        keys.insert(key.to_owned()).then(|| InUse(self.clone(), key.to_owned()))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Once {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// Carries a request out once per key.
pub(crate) async fn once(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Response {
    if !request.headers().contains_key(HEADER) {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    let body = match extract::read(Request::from_parts(parts.clone(), body), &state).await {
        Ok(body) => body,
        Err(error) => return error.into_response(),
    };
    match claimed(&state, parts, body, next).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn claimed(
    state: &ServerState,
    mut parts: Parts,
    body: Bytes,
    next: Next,
) -> Result<Response, ApiError> {
    let key = key(&parts)?;
    // Before it is claimed: what is only meant to be made may be being made just now.
    let _in_use = state.under_way.begin(&key).ok_or_else(in_progress)?;
    let meant = match state.sessions.idempotency_claim(&key, &fingerprint(&parts, &body)).await? {
        Claim::New => Vec::new(),
        Claim::Done { answer } => return replay(&answer),
        Claim::Made { ids } if parts.uri.path().starts_with("/v1/sandboxes") => ids,
        Claim::Made { ids } => return show(state, &parts, &ids).await,
        Claim::InProgress => return Err(in_progress()),
        Claim::Mismatch => {
            let detail = "this key was used for another request";
            return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "key_reused", detail)
                .hint("a new request needs a new Idempotency-Key"));
        }
    };
    parts.extensions.insert(Meant(meant));
    parts.extensions.insert(Once(Some(key.clone())));
    let response = next.run(Request::from_parts(parts, Body::from(body))).await;
    keep(state, &key, response).await
}

fn in_progress() -> ApiError {
    let detail = "the first request with this key is still being carried out";
    ApiError::new(StatusCode::CONFLICT, "in_progress", detail).hint("ask again in a moment")
}

/// Keeps what was created; what failed may be tried again with the same key.
async fn keep(state: &ServerState, key: &str, response: Response) -> Result<Response, ApiError> {
    if !response.status().is_success() {
        if let Err(error) = state.sessions.idempotency_release(key).await {
            tracing::warn!(error = words(&error), "a key cannot be released");
        }
        return Ok(response);
    }
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.map_err(|_| {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "an answer could not be read back",
        )
    })?;
    let kept =
        Kept { status: parts.status.as_u16(), body: String::from_utf8_lossy(&bytes).into_owned() };
    let answer = serde_json::to_string(&kept).expect("a number and a text are JSON");
    // It is made, and whoever waits for it hears so: who asks again is shown it by its key.
    if let Err(error) = state.sessions.idempotency_finish(key, &answer).await {
        tracing::warn!(error = words(&error), "an answer cannot be kept");
    }
    Ok(Response::from_parts(parts, Body::from(bytes)))
}

fn replay(answer: &str) -> Result<Response, ApiError> {
    let unreadable = || {
        let detail = "the kept answer of this key cannot be read";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
    };
    let kept: Kept = serde_json::from_str(answer).map_err(|_| unreadable())?;
    let status = StatusCode::from_u16(kept.status).map_err(|_| unreadable())?;
    let mut response = (status, kept.body).into_response();
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(replayed(response))
}

/// What the first request made, in the words it would have been answered with.
async fn show(state: &ServerState, parts: &Parts, ids: &[String]) -> Result<Response, ApiError> {
    let mut below =
        parts.uri.path().trim_start_matches("/v1/sessions").trim_start_matches('/').split('/');
    let (session, verb) = (below.next().and_then(|part| part.parse().ok()), below.next());
    let response = match state.sessions.made_under_key(session.as_ref(), ids).await? {
        Made::Prompt(prompt) => (StatusCode::ACCEPTED, Json(prompt)).into_response(),
        Made::Sessions(items) if verb == Some("fork") => {
            (StatusCode::CREATED, Json(Page { items, next_cursor: None })).into_response()
        }
        Made::Sessions(items) => {
            (StatusCode::CREATED, Json(items.into_iter().next())).into_response()
        }
    };
    Ok(replayed(response))
}

/// Says that what is answered was made for an earlier request.
pub(crate) fn replayed(mut response: Response) -> Response {
    response.headers_mut().insert("idempotency-replayed", HeaderValue::from_static("true"));
    response
}

/// Keys of different people do not meet.
fn key(parts: &Parts) -> Result<String, ApiError> {
    let given = parts.headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or("");
    if given.is_empty() || given.len() > MAX_KEY_BYTES {
        let detail = format!("`Idempotency-Key` is not 1 to {MAX_KEY_BYTES} ASCII characters");
        return Err(ApiError::invalid("invalid_key", detail));
    }
    let whose = parts.extensions.get::<Holder>().map_or("", |holder| holder.0.user.email.as_str());
    Ok(format!("{whose} {given}"))
}

/// What tells one request from another; no part can be taken for the next.
fn fingerprint(parts: &Parts, body: &[u8]) -> Vec<u8> {
    [parts.method.as_str().as_bytes(), b" ", parts.uri.path().as_bytes(), b"\n", body].concat()
}
