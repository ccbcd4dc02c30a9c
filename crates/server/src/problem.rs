//! Errors as clients see them: RFC 9457 problems with a `code`, a `hint` and the request's id.
//!
//! A handler answers with an [`ApiError`]; it does not know the request's id, so the problem rides
//! along as an extension and [`finish`] writes it down once, for our errors and for axum's own alike.

use std::panic::AssertUnwindSafe;

use axum::{
    Json,
    extract::Request,
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use harvest_proto::{SessionId, api::Problem, bridge::FaultCode};
pub(crate) use harvest_session::words;
use harvest_session::{SessionError, bridge::BridgeError};
use tracing::Instrument;

use crate::metrics;

/// Names a request in answers and in the log.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What a handler could not do, in words for the client.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) detail: String,
    pub(crate) hint: Option<String>,
    /// When to ask again, in seconds.
    pub(crate) retry_after: Option<u64>,
}

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

    /// The request makes no sense as it was sent.
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
            SessionError::Store(error) if error.is_full() => StatusCode::INSUFFICIENT_STORAGE,
            SessionError::Bridge(error) => bridge_status(error),
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let hint = match &error {
            SessionError::NotFound { what } => Some(where_to_look(what)),
            _ => error.hint(),
        };
        let detail = match &error {
            SessionError::Bridge(BridgeError::Fault(fault)) => fault.message.clone(),
            _ => words(&error),
        };
        let (code, hint) = (error.code(), hint.map(str::to_owned));
        let retry_after = (status == StatusCode::SERVICE_UNAVAILABLE).then_some(1);
        Self { status, code, detail, hint, retry_after }
    }
}

/// A supervisor that says no has understood; one that cannot be reached has not.
fn bridge_status(error: &BridgeError) -> StatusCode {
    let BridgeError::Fault(fault) = error else {
        return match error {
            BridgeError::Outdated => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
    };
    match fault.code {
        _ if fault.full => StatusCode::PAYLOAD_TOO_LARGE,
        FaultCode::NotFound => StatusCode::NOT_FOUND,
        FaultCode::Denied => StatusCode::FORBIDDEN,
        FaultCode::Busy | FaultCode::NotReady | FaultCode::NotOwner => StatusCode::CONFLICT,
        FaultCode::NotExecutable | FaultCode::Invalid | FaultCode::System => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
    }
}

/// Which verb lists what was not found.
fn where_to_look(what: &str) -> &'static str {
    match what.split_whitespace().next() {
        Some("repository") => "`harvest repo ls` lists those there are",
        Some("image") => {
            "`harvest image ls` lists those there are, `harvest image build` makes one"
        }
        Some("snapshot") => "`harvest snapshot ls` lists those there are",
        Some("secret") => "`harvest secret ls` lists those there are",
        Some("token") => "`harvest token ls` lists those there are",
        Some("prompt") => "`harvest queue ls SESSION` lists those there are",
        Some("turn") => "`harvest show SESSION` lists those that ended",
        _ => "`harvest ls` lists sessions",
    }
}

/// The id [`name_request`] gave the request at hand.
#[derive(Debug, Clone)]
pub(crate) struct RequestName(pub(crate) String);

/// Gives every request an id, puts it on the answer and on what is logged meanwhile, and writes one line
/// about both.
pub(crate) async fn name_request(mut request: Request, next: Next) -> Response {
    let name = random_name();
    request.extensions_mut().insert(RequestName(name.clone()));
    // Route and session only: a path, a query or a header may hold what must not be in a log.
    let span = tracing::error_span!(
        "request",
        id = %name,
        method = %request.method(),
        route = metrics::route(&request),
        session = session(request.uri().path()).map(tracing::field::display),
    );
    let began = std::time::Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    span.in_scope(|| tracing::info!(status = response.status().as_u16(), millis, "answered"));
    let value = HeaderValue::from_str(&name).expect("our own names are plain ASCII");
    response.headers_mut().insert(REQUEST_ID, value);
    response
}

/// The session a path names.
fn session(path: &str) -> Option<SessionId> {
    path.strip_prefix("/v1/sessions/")?.split('/').next()?.parse().ok()
}

/// Turns every error answer of the API into a problem. The forge's own stay as git expects them.
pub(crate) async fn finish(request: Request, next: Next) -> Response {
    finish_as(request, next, true).await
}

/// The same where whoever asks is this process: it tells the person itself.
pub(crate) async fn finish_unlogged(request: Request, next: Next) -> Response {
    finish_as(request, next, false).await
}

async fn finish_as(request: Request, next: Next, logged: bool) -> Response {
    let forge = request.uri().path().starts_with("/forge/");
    let name =
        request.extensions().get::<RequestName>().map_or_else(random_name, |name| name.0.clone());
    // A bug in a handler costs its own request only, and is told like any other failure.
    let response = AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|_| {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the request broke off inside the server",
        )
        .into_response()
    });
    let status = response.status();
    let failed = status.is_client_error() || status.is_server_error();
    if !failed || (forge && response.extensions().get::<ApiError>().is_none()) {
        return response;
    }
    let (mut parts, _) = response.into_parts();
    let error = parts.extensions.remove::<ApiError>().unwrap_or_else(|| foreign(status));
    if logged && status.is_server_error() {
        tracing::error!(code = error.code, detail = %error.detail, "failed");
    }
    let mut answer = write(error, name);
    // What the router itself adds to an error, such as `Allow` on 405, stays.
    for kept in [header::ALLOW, header::WWW_AUTHENTICATE, header::RETRY_AFTER] {
        if let Some(value) = parts.headers.remove(&kept) {
            answer.headers_mut().insert(kept, value);
        }
    }
    answer
}

/// An error that some layer below made without our words.
fn foreign(status: StatusCode) -> ApiError {
    let title = status.canonical_reason().unwrap_or("error");
    let code = match status {
        StatusCode::NOT_FOUND => "not_found",
        StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
        StatusCode::PAYLOAD_TOO_LARGE => "too_large",
        _ if status.is_server_error() => "internal",
        _ => "invalid_request",
    };
    ApiError::new(status, code, format!("the request was refused: {}", title.to_lowercase()))
}

fn write(error: ApiError, request_id: String) -> Response {
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

fn random_name() -> String {
    let mut bytes = [0u8; 6];
    getrandom::fill(&mut bytes)
        .expect("the kernel's random source is there on every Linux we support");
    bytes.iter().fold(String::from("req_"), |name, byte| name + &format!("{byte:02x}"))
}
