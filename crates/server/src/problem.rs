//! Errors as RFC 9457 problem documents with a `code`, a `hint` and the request's id.
//!
//! A handler returns an [`ApiError`], which travels as a response extension because handlers do not
//! know the request's id; [`render`] turns it, and errors of axum itself, into the document.

use std::{borrow::Cow, panic::AssertUnwindSafe};

use axum::{
    Json,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use harvest_proto::{Hint, SessionId, api::Problem, bridge::FaultCode};
pub(crate) use harvest_session::error_chain;
use harvest_session::{SessionError, bridge::BridgeError, decide::Limit, sandboxes::SandboxError};
use tracing::Instrument;

use crate::{metrics, route_path::RoutePath};

/// Identifies a request in responses and in the log.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

// `Retry-After` in seconds when a slot is about to become free.
const RETRY_SOON: u64 = 1;

// `Retry-After` in seconds when all slots are in use.
const RETRY_LATER: u64 = 15;

/// An error response.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) detail: String,
    pub(crate) hint: Option<String>,
    /// In seconds.
    pub(crate) retry_after: Option<u64>,
}

/// The result of a handler that answers with JSON.
pub(crate) type JsonResult<T> = Result<Json<T>, ApiError>;

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into(), hint: None, retry_after: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// 400 Bad Request.
    pub(crate) fn invalid(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, detail)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> Self {
        let status = match &error {
            SessionError::NotFound { .. } => StatusCode::NOT_FOUND,
            SessionError::Conflict { .. } => StatusCode::CONFLICT,
            SessionError::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            SessionError::Stopped => StatusCode::SERVICE_UNAVAILABLE,
            SessionError::Store(error) if error.is_busy() => StatusCode::SERVICE_UNAVAILABLE,
            SessionError::Store(error) if error.is_disk_full() => StatusCode::INSUFFICIENT_STORAGE,
            // The session exists; the image or snapshot that it needs does not.
            SessionError::Sandbox(SandboxError::Missing(_)) => StatusCode::CONFLICT,
            SessionError::Sandbox(error) => sandbox_status(error),
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let (code, hint) = (error.code(), error.hint().map(Cow::into_owned));
        match error {
            SessionError::Sandbox(error) => Self { status, hint, ..error.into() },
            error => {
                let retry_after = (status == StatusCode::SERVICE_UNAVAILABLE).then_some(1);
                Self { hint, retry_after, ..Self::new(status, code, error_chain(&error)) }
            }
        }
    }
}

impl From<SandboxError> for ApiError {
    fn from(error: SandboxError) -> Self {
        let retry_after = match &error {
            SandboxError::LimitReached { releasing, limit, .. } => {
                Some(if *releasing || *limit == Limit::Closed { RETRY_SOON } else { RETRY_LATER })
            }
            _ => None,
        };
        let detail = match &error {
            SandboxError::Bridge(BridgeError::Fault(fault)) => fault.message.clone(),
            _ => error_chain(&error),
        };
        let hint = error.hint().map(Cow::into_owned);
        Self { hint, retry_after, ..Self::new(sandbox_status(&error), error.code(), detail) }
    }
}

fn sandbox_status(error: &SandboxError) -> StatusCode {
    match error {
        SandboxError::Missing(_) => StatusCode::NOT_FOUND,
        // A full disk is neither the client's error nor a failure of the server.
        SandboxError::NotRunning { .. }
        | SandboxError::Conflict { .. }
        | SandboxError::NoSpace { .. } => StatusCode::CONFLICT,
        SandboxError::NotAllowed { .. } => StatusCode::FORBIDDEN,
        SandboxError::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
        SandboxError::LimitReached { limit: Limit::Closed, .. } => StatusCode::SERVICE_UNAVAILABLE,
        SandboxError::LimitReached { .. } => StatusCode::TOO_MANY_REQUESTS,
        SandboxError::Bridge(error) => bridge_status(error),
        SandboxError::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// An error reported by the supervisor is the client's. A broken connection to it is temporary: the
/// sandbox or the server is stopping.
fn bridge_status(error: &BridgeError) -> StatusCode {
    let BridgeError::Fault(fault) = error else { return StatusCode::SERVICE_UNAVAILABLE };
    match fault.code {
        _ if fault.full => StatusCode::PAYLOAD_TOO_LARGE,
        FaultCode::NotFound => StatusCode::NOT_FOUND,
        FaultCode::Denied => StatusCode::FORBIDDEN,
        FaultCode::Busy | FaultCode::NotReady | FaultCode::NeedsHistory | FaultCode::NotOwner => {
            StatusCode::CONFLICT
        }
        FaultCode::NotExecutable | FaultCode::Invalid | FaultCode::System => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
    }
}

/// The id set by [`assign_request_id`].
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

/// Gives every request an id, adds it to the response and to the request's log lines, and logs the
/// outcome.
pub(crate) async fn assign_request_id(mut request: Request, next: Next) -> Response {
    let id = random_request_id();
    request.extensions_mut().insert(RequestId(id.clone()));
    // Only route and session: path, query and headers may contain secrets.
    let span = tracing::error_span!(
        "request",
        %id,
        method = %request.method(),
        route = metrics::route(&request),
        session = session_id(&request).map(tracing::field::display),
    );
    let started = std::time::Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    span.in_scope(|| tracing::info!(status = response.status().as_u16(), millis, "answered"));
    let value = HeaderValue::from_str(&id).expect("request ids are ASCII");
    response.headers_mut().insert(REQUEST_ID, value);
    response
}

fn session_id(request: &Request) -> Option<SessionId> {
    RoutePath::of(request).parameter("{session}")?.parse().ok()
}

/// Turns every error response of the API into a problem document. The forge's errors stay as git
/// expects them. Not `logged` for in-process requests, whose caller reports the error.
pub(crate) async fn render(State(logged): State<bool>, request: Request, next: Next) -> Response {
    let forge = request.uri().path().starts_with("/forge/");
    let session = session_id(&request);
    let id =
        request.extensions().get::<RequestId>().map_or_else(random_request_id, |id| id.0.clone());
    // A panic in a handler fails only its own request.
    let response = AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|_| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the request handler panicked")
            .into_response()
    });
    let status = response.status();
    let failed = status.is_client_error() || status.is_server_error();
    if !failed || (forge && response.extensions().get::<ApiError>().is_none()) {
        return response;
    }
    let (mut parts, _) = response.into_parts();
    let mut error = parts.extensions.remove::<ApiError>().unwrap_or_else(|| generic(status));
    if let (Some(session), Some(hint)) = (session, &mut error.hint) {
        *hint = fill_session(hint, &session);
    }
    if logged && status.is_server_error() {
        tracing::error!(code = error.code, detail = %error.detail, "request failed");
    }
    let mut response = document(error, id);
    // Preserve headers that belong to the status, such as `Allow` on 405.
    for name in [header::ALLOW, header::WWW_AUTHENTICATE, header::RETRY_AFTER] {
        if let Some(value) = parts.headers.remove(&name) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// A hint whose commands name the session of the request: they can be pasted as they are.
fn fill_session(hint: &str, session: &SessionId) -> String {
    hint.replace("SESSION", &session.to_string())
}

/// The error for a status set by axum or hyper.
fn generic(status: StatusCode) -> ApiError {
    let title = status.canonical_reason().unwrap_or("error");
    let code = match status {
        StatusCode::NOT_FOUND => "not_found",
        StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
        StatusCode::PAYLOAD_TOO_LARGE => "too_large",
        _ if status.is_server_error() => "internal",
        _ => "invalid_request",
    };
    ApiError::new(status, code, format!("the request was rejected: {}", title.to_lowercase()))
}

fn document(error: ApiError, request_id: String) -> Response {
    let problem = Problem {
        kind: "about:blank".into(),
        title: error.status.canonical_reason().unwrap_or("Error").into(),
        status: error.status.as_u16(),
        detail: error.detail,
        code: error.code.into(),
        hint: error.hint,
        request_id,
    };
    let mut response = (error.status, Json(problem)).into_response();
    let kind = HeaderValue::from_static("application/problem+json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn random_request_id() -> String {
    let mut bytes = [0u8; 6];
    getrandom::fill(&mut bytes).expect("getrandom is available on every supported kernel");
    bytes.iter().fold(String::from("req_"), |id, byte| id + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_the_session_of_the_request() {
        let id: SessionId = "ses_0123456789ab".parse().unwrap();
        let hint = fill_session("`harvest resume SESSION` resumes it", &id);
        assert_eq!(hint, "`harvest resume ses_0123456789ab` resumes it");
    }

    #[test]
    fn busy_database_is_unavailable_for_a_moment() {
        let busy = harvest_store::StoreError::Database(sqlx::Error::PoolTimedOut);
        let error = ApiError::from(SessionError::Store(busy));
        assert_eq!((error.status, error.code), (StatusCode::SERVICE_UNAVAILABLE, "database_busy"));
        assert_eq!(error.retry_after, Some(1));
    }

    #[test]
    fn broken_bridge_is_unavailable() {
        let error = ApiError::from(SandboxError::Bridge(BridgeError::Lost));
        assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
    }
}
