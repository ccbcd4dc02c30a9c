//! The model door: accepts requests of four protocols (Anthropic Messages, OpenAI Responses and
//! Chat Completions, Gemini) from agents, checks them with the ledger, forwards them to an upstream
//! and records the usage. Knows no prices.
//!
//! The path says what is asked of which upstream: `/v1/messages` is for the upstream of the
//! session's model, `/UPSTREAM/v1/messages` for the one of that name. Likewise `responses`,
//! `chat/completions` and `models`, and `/v1beta/models/NAME:METHOD` of Gemini.

mod catalog;
mod chat_usage;
mod forward;
mod most_tokens;
mod outside;
mod route;
mod scripted;
mod upstreams;
mod usage;

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use harvest_proto::{
    CallId, EventBody, UpstreamKind, UpstreamName, door::MODEL_NAME, event::Usage,
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderName, HeaderValue},
};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{
    door::Door,
    http::{self, Abort, Body},
    ledger::{PlannedCall, Refusal, Used},
    policy::{self, Verdict},
};

pub(crate) use catalog::list as list_models;
pub(crate) use most_tokens::most_tokens;
use outside::OutsideError;
pub(crate) use route::Endpoint;
use route::Route;
pub(crate) use scripted::FailureCounts;
pub use upstreams::check_service_url;
pub use upstreams::{Upstream, UpstreamError, Upstreams};
pub(crate) use usage::bounded;

const UPSTREAM: HeaderName = HeaderName::from_static("x-harvest-upstream");
// The API's limit for a request.
const MAX_REQUEST_BYTES: usize = 32 * 1024 * 1024;
// OpenRouter allows three.
const MAX_FALLBACKS: usize = 16;
const NO_MODEL: &str = "a check calls no model: its result must depend on the commit alone; let the \
                        tests use a recorded or scripted response";
// nginx's status for a client that disconnected before the response; not a standard one.
const CLIENT_GONE: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::REQUEST_TIMEOUT,
};

/// Receives the response of an upstream. Closed when the agent has disconnected.
type Reply = oneshot::Sender<Result<Response<Body>, Abort>>;

/// A complete request of an agent.
struct Call {
    door: Arc<Door>,
    route: Route,
    upstream: Upstream,
    method: Method,
    headers: HeaderMap,
    body: Bytes,
    /// Reserved memory for the body.
    _memory: OwnedSemaphorePermit,
}

struct CallResult {
    status: StatusCode,
    used: Used,
}

pub(crate) async fn answer(
    door: Arc<Door>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    if door.policy.purpose.is_check() {
        door.log_refusal(MODEL_NAME, NO_MODEL, None).await;
        return Ok(error(StatusCode::FORBIDDEN, "permission_error", NO_MODEL));
    }
    let (route, upstream) = match find_route(&door, &request) {
        Ok(found) => found,
        Err(refused) => return Ok(refused),
    };
    let (parts, body) = request.into_parts();
    let memory = Arc::clone(&door.body_memory_kib)
        .acquire_many_owned(body_kib(&parts.headers))
        .await
        .map_err(|_| Abort)?;
    let body = match read_body(body).await {
        Ok(body) => body,
        Err(refused) => return refused,
    };
    if let Err(refused) = outside::check(route.endpoint, &body, &door.network()) {
        return Ok(refuse_outside(&door, refused).await);
    }
    let (method, headers) = (parts.method, parts.headers);
    let call = Call { door, route, upstream, method, headers, body, _memory: memory };
    // A separate task: what it reserves is settled even when the agent disconnects or the door
    // closes.
    let (reply, answered) = oneshot::channel();
    tokio::spawn(call.run(reply));
    answered.await.unwrap_or(Err(Abort))
}

/// The endpoint and the upstream of a request.
#[expect(clippy::result_large_err, reason = "the error is the response to send")]
fn find_route(
    door: &Door,
    request: &Request<Incoming>,
) -> Result<(Route, Upstream), Response<Body>> {
    let invalid =
        |message: String| error(StatusCode::BAD_REQUEST, "invalid_request_error", &message);
    let not_found = |message: String| error(StatusCode::NOT_FOUND, "not_found_error", &message);
    let (method, path) = (request.method(), request.uri().path());
    let query = request.uri().query();
    let own = door.policy.upstream.borrow().clone();
    let Some(route) = Route::parse(method, path, query, &own) else {
        return Err(not_found(format!("{method} {path} is not supported")));
    };
    let name = &route.upstream;
    let Some(upstream) = door.shared.config.upstreams.get(name) else {
        return Err(not_found(format!("upstream `{name}` is not configured on this server")));
    };
    if !allows_upstream(&own, name) {
        let reason = "a session of the scripted model calls no other";
        return Err(invalid(format!("upstream `{name}` is not for this sandbox: {reason}")));
    }
    if !route.endpoint.is_served_by(upstream.kind) {
        let message = format!("upstream `{name}` ({}) does not serve {path}", upstream.kind);
        return Err(not_found(message));
    }
    Ok((route, upstream.clone()))
}

// A sandbox without a paid model, such as that of a build, must not be able to spend money.
fn allows_upstream(own: &UpstreamName, asked: &UpstreamName) -> bool {
    let scripted = UpstreamName::scripted();
    *own != scripted || *asked == scripted
}

/// Refuses a request that would make the model service reach what the sandbox may not.
async fn refuse_outside(door: &Door, refused: OutsideError) -> Response<Body> {
    let message = match refused {
        OutsideError::Malformed(message) => message,
        OutsideError::NotAllowed(name) => {
            let network = door.network();
            let (reason, hint) = match policy::judge(&network, &name, 443) {
                Verdict::Refused { reason, hint } => (reason, hint),
                // The name itself is allowed, but not what the request asks of it.
                Verdict::Allowed { .. } => (network.refusal(), None),
            };
            let logged = format!("asked of the model service, {reason}");
            door.log_refusal(&name, &logged, hint).await;
            format!("the request asks the model service for {name}, {reason}")
        }
    };
    error(StatusCode::BAD_REQUEST, "invalid_request_error", &message)
}

// A body without a length may have the maximum size.
fn body_kib(headers: &HeaderMap) -> u32 {
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let kib = length.unwrap_or(MAX_REQUEST_BYTES).min(MAX_REQUEST_BYTES) / 1024;
    u32::try_from(kib).unwrap_or(u32::MAX).max(1)
}

async fn read_body(body: Incoming) -> Result<Bytes, Result<Response<Body>, Abort>> {
    match Limited::new(body, MAX_REQUEST_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(failed) if failed.is::<LengthLimitError>() => {
            let message = "the request is longer than 32 MiB";
            let mut refused = error(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message);
            // The rest of the body is not read, so the connection cannot be used again.
            refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            Err(Ok(refused))
        }
        Err(_) => Err(Err(Abort)),
    }
}

impl Call {
    async fn run(self, reply: Reply) {
        if !self.route.endpoint.uses_tokens() {
            self.make(reply).await;
            return;
        }
        let planned = match self.plan() {
            Ok(planned) => planned,
            Err(message) => {
                let refused = error(StatusCode::BAD_REQUEST, "invalid_request_error", &message);
                respond(reply, refused);
                return;
            }
        };
        let (ledger, session) = (&self.door.shared.ledger, &self.door.policy.session);
        if let Err(refusal) = ledger.reserve(session, &planned).await {
            respond(reply, refuse_budget(&refusal));
            return;
        }
        let started = Instant::now();
        let result = self.make(reply).await;
        let usage = ledger.settle(session, &planned, bounded(result.used)).await;
        let event = EventBody::ModelCall {
            upstream: planned.upstream.to_string(),
            model: planned.model,
            status: result.status.as_u16(),
            usage,
            millis: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        self.door.log(event).await;
    }

    async fn make(&self, reply: Reply) -> CallResult {
        match self.upstream.kind {
            UpstreamKind::Scripted => scripted::answer(self, reply).await,
            _ => forward::answer(self, reply).await,
        }
    }

    fn plan(&self) -> Result<PlannedCall, String> {
        Ok(PlannedCall {
            id: CallId::random(),
            upstream: self.route.upstream.clone(),
            keyed: self.is_keyed(),
            model: self.model(),
            fallbacks: self.fallbacks()?,
            most: most_tokens(self.route.endpoint, &self.body)?,
        })
    }

    fn is_keyed(&self) -> bool {
        self.upstream.secret.is_some() || self.upstream.oauth_secret.is_some()
    }

    /// Names the upstream in a response.
    fn label(&self, headers: &mut HeaderMap) {
        if let Ok(name) = HeaderValue::from_str(&self.route.upstream) {
            headers.insert(UPSTREAM, name);
        }
    }

    /// The requested model; empty when the request has none.
    fn model(&self) -> String {
        #[derive(Deserialize)]
        struct Named {
            model: String,
        }
        let named = match self.route.model() {
            Some(name) => name.to_owned(),
            None => serde_json::from_slice::<Named>(&self.body)
                .map(|named| named.model)
                .unwrap_or_default(),
        };
        named.chars().take(100).collect()
    }

    /// The models that a service with several providers uses when the first one fails.
    fn fallbacks(&self) -> Result<Vec<String>, String> {
        #[derive(Deserialize)]
        struct Fallbacks {
            models: Option<Vec<String>>,
        }
        let models = serde_json::from_slice::<Fallbacks>(&self.body)
            .map_err(|error| format!("the request is malformed: {error}"))?
            .models
            .unwrap_or_default();
        match models.len() <= MAX_FALLBACKS {
            true => Ok(models),
            false => Err(format!("the request names more than {MAX_FALLBACKS} models")),
        }
    }
}

impl CallResult {
    fn unused(status: StatusCode) -> Self {
        Self { status, used: Used::Counted(Usage::default()) }
    }
}

/// Sends a complete response; the agent may have disconnected.
fn respond(reply: Reply, response: Response<Body>) -> CallResult {
    let status = response.status();
    match reply.send(Ok(response)) {
        Ok(()) => CallResult::unused(status),
        Err(_) => CallResult::unused(CLIENT_GONE),
    }
}

/// An error response in the format of all APIs.
fn error(status: StatusCode, kind: &str, message: &str) -> Response<Body> {
    error_with_code(status, kind, None, message)
}

// Agents retry neither 400 nor 403, and call the latter an authentication failure. All retry 429,
// but clients of OpenAI not with the code `insufficient_quota`.
fn refuse_budget(refusal: &Refusal) -> Response<Body> {
    let (status, kind, code) = match refusal {
        Refusal::Final(_) => {
            (StatusCode::BAD_REQUEST, "invalid_request_error", "insufficient_quota")
        }
        Refusal::Retry(_) => {
            (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded")
        }
    };
    error_with_code(status, kind, Some(code), &refusal.to_string())
}

fn error_with_code(
    status: StatusCode,
    kind: &str,
    code: Option<&str>,
    message: &str,
) -> Response<Body> {
    let error = json!({"type": kind, "message": message, "param": null, "code": code});
    let body = json!({"type": "error", "error": error});
    http::with_type(status, "application/json", body.to_string())
}
