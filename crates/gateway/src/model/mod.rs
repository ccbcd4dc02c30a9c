//! The model door: accepts requests of the Anthropic API from agents, checks them with the ledger,
//! forwards them to an upstream and records the usage. Knows no prices.

mod anthropic;
mod conversation;
mod outside;
mod scripted;
mod usage;

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use harvest_proto::{EventBody, Upstream, event::Usage};
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
};

use outside::OutsideError;
pub(crate) use scripted::FailureCounts;

/// The name of the secret with the key of a model service; `None` when it needs none.
pub(crate) const fn key_name(upstream: Upstream) -> Option<&'static str> {
    match upstream {
        Upstream::Anthropic => Some(anthropic::KEY),
        Upstream::Scripted => None,
    }
}

const UPSTREAM: HeaderName = HeaderName::from_static("x-harvest-upstream");
// The API's limit for a request.
const MAX_REQUEST_BYTES: usize = 32 * 1024 * 1024;
// nginx's status for a client that disconnected before the response; not a standard one.
const CLIENT_GONE: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::REQUEST_TIMEOUT,
};

/// Receives the response of an upstream. Closed when the agent has disconnected.
type Reply = oneshot::Sender<Result<Response<Body>, Abort>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    Messages,
    CountTokens,
}

/// A complete request of an agent.
struct Call {
    door: Arc<Door>,
    endpoint: Endpoint,
    /// Path and query as sent by the agent.
    target: String,
    headers: HeaderMap,
    body: Bytes,
    /// Reserved memory for the body.
    _memory: OwnedSemaphorePermit,
}

struct CallResult {
    status: StatusCode,
    usage: Usage,
}

pub(crate) async fn answer(
    door: Arc<Door>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    let endpoint = match (request.method(), request.uri().path()) {
        (&Method::POST, "/v1/messages") => Endpoint::Messages,
        (&Method::POST, "/v1/messages/count_tokens") => Endpoint::CountTokens,
        (method, path) => {
            let message = format!("{method} {path} is not supported");
            return Ok(error(StatusCode::NOT_FOUND, "not_found_error", &message));
        }
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
    if let Err(refused) = outside::check(&body, &door.policy.network) {
        return Ok(refuse_outside(&door, refused).await);
    }
    if let Err(refusal) = door.shared.ledger.reserve(&door.policy.session).await {
        // Agents retry neither 400 nor 403, and call the latter an authentication failure.
        return Ok(error(StatusCode::BAD_REQUEST, "invalid_request_error", &refusal.reason));
    }
    let call = Call {
        door,
        endpoint,
        target: parts.uri.path_and_query().map_or_else(String::new, ToString::to_string),
        headers: parts.headers,
        body,
        _memory: memory,
    };
    // A separate task: it records the usage even when the agent disconnects or the door closes.
    let (reply, answered) = oneshot::channel();
    tokio::spawn(call.run(reply));
    answered.await.unwrap_or(Err(Abort))
}

/// Refuses a request that would make the model service reach what the sandbox may not.
async fn refuse_outside(door: &Door, refused: OutsideError) -> Response<Body> {
    let message = match refused {
        OutsideError::Malformed(message) => message,
        OutsideError::NotAllowed(name) => {
            let network = &door.policy.network;
            let reason = format!("asked of the model service, {}", network.refusal());
            door.log_refusal(&name, &reason, network.hint(&name)).await;
            format!("the request asks the model service for {name}, {}", network.refusal())
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
        let started = Instant::now();
        let (name, result) = match self.door.policy.upstream {
            Upstream::Anthropic => ("anthropic", anthropic::answer(&self, reply).await),
            Upstream::Scripted => ("scripted", scripted::answer(&self, reply).await),
        };
        let (ledger, session) = (&self.door.shared.ledger, &self.door.policy.session);
        let usage = usage::bounded(result.usage);
        ledger.settle(session, usage).await;
        if self.endpoint == Endpoint::Messages {
            let event = EventBody::ModelCall {
                upstream: name.to_owned(),
                model: self.model(),
                status: result.status.as_u16(),
                usage,
                millis: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            };
            self.door.log(event).await;
        }
    }

    /// The requested model; empty when the request has none.
    fn model(&self) -> String {
        #[derive(Deserialize)]
        struct Named {
            model: String,
        }
        let named = serde_json::from_slice::<Named>(&self.body)
            .map(|named| named.model)
            .unwrap_or_default();
        named.chars().take(100).collect()
    }
}

impl CallResult {
    fn unused(status: StatusCode) -> Self {
        Self { status, usage: Usage::default() }
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

/// An error response in the format of the API.
fn error(status: StatusCode, kind: &str, message: &str) -> Response<Body> {
    let body = json!({"type": "error", "error": {"type": kind, "message": message}});
    http::with_type(status, "application/json", body.to_string())
}
