//! The model door: takes the Anthropic API's requests from agents, asks the ledger, has an upstream
//! answer, and reports what was used. Knows no prices.

mod anthropic;
mod conversation;
mod scripted;
mod usage;

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use harvest_proto::{EventBody, SessionId, event::Usage};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{
    door::Door,
    http::{self, Body, Cut},
    ledger::Upstream,
};

pub(crate) use scripted::Mishaps;

// The API's own limit on a request.
const MAX_REQUEST_BYTES: usize = 32 * 1024 * 1024;
// What nginx logs for a client that hung up before it was answered; no standard has a number for it.
const CLIENT_GONE: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::REQUEST_TIMEOUT,
};

/// Where an upstream puts its answer. Closed when the agent has gone.
type Reply = oneshot::Sender<Result<Response<Body>, Cut>>;

/// What is asked of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    Message,
    CountTokens,
}

/// One request of an agent, read whole.
struct Call {
    door: Arc<Door>,
    session: SessionId,
    upstream: Upstream,
    question: Question,
    /// Path and query as the agent sent them.
    target: String,
    headers: HeaderMap,
    body: Bytes,
    /// The room in the host's memory that the body takes up.
    _held: OwnedSemaphorePermit,
}

/// How a call ended.
struct Ended {
    status: StatusCode,
    usage: Usage,
}

/// Answers one request at the model door.
pub(crate) async fn answer(
    door: Arc<Door>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Cut> {
    let question = match (request.method(), request.uri().path()) {
        (&Method::POST, "/v1/messages") => Question::Message,
        (&Method::POST, "/v1/messages/count_tokens") => Question::CountTokens,
        (method, path) => {
            let message = format!("{method} {path} is not served here");
            return Ok(error(StatusCode::NOT_FOUND, "not_found_error", &message));
        }
    };
    let pass = door.pass();
    let (parts, body) = request.into_parts();
    let held = Arc::clone(&door.held_kib)
        .acquire_many_owned(weight_kib(&parts.headers))
        .await
        .map_err(|_| Cut)?;
    let body = match read_whole(body).await {
        Ok(body) => body,
        Err(refused) => return refused,
    };
    if let Err(refusal) = door.shared.ledger.reserve(&pass.session).await {
        return Ok(error(StatusCode::FORBIDDEN, "permission_error", &refusal.reason));
    }
    let call = Call {
        door,
        session: pass.session.clone(),
        upstream: pass.upstream.clone(),
        question,
        target: parts.uri.path_and_query().map_or_else(String::new, ToString::to_string),
        headers: parts.headers,
        body,
        _held: held,
    };
    // A task of its own: it settles even when the agent hangs up or the door closes.
    let (reply, answered) = oneshot::channel();
    tokio::spawn(call.run(reply));
    answered.await.unwrap_or(Err(Cut))
}

// A body that does not say how long it is may be as long as any.
fn weight_kib(headers: &HeaderMap) -> u32 {
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let kib = length.unwrap_or(MAX_REQUEST_BYTES).min(MAX_REQUEST_BYTES) / 1024;
    u32::try_from(kib).unwrap_or(u32::MAX).max(1)
}

async fn read_whole(body: Incoming) -> Result<Bytes, Result<Response<Body>, Cut>> {
    match Limited::new(body, MAX_REQUEST_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(failed) if failed.is::<LengthLimitError>() => {
            let message = "the request is longer than 32 MiB";
            let mut refused = error(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message);
            // The rest of the body is never read, so nothing else can come on this connection.
            refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            Err(Ok(refused))
        }
        Err(_) => Err(Err(Cut)),
    }
}

impl Call {
    async fn run(self, reply: Reply) {
        let started = Instant::now();
        let (name, ended) = match self.upstream {
            Upstream::Anthropic => ("anthropic", anthropic::answer(&self, reply).await),
            Upstream::Scripted => ("scripted", scripted::answer(&self, reply).await),
        };
        self.door.shared.ledger.settle(&self.session, ended.usage).await;
        if self.question == Question::Message {
            let event = EventBody::ModelCall {
                upstream: name.to_owned(),
                model: self.model(),
                status: ended.status.as_u16(),
                usage: ended.usage,
                millis: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            };
            self.door.shared.ledger.log(&self.session, event).await;
        }
    }

    /// The model asked for; empty when the request does not say.
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

impl Ended {
    fn unused(status: StatusCode) -> Self {
        Self { status, usage: Usage::default() }
    }
}

/// Gives an answer in one piece; the agent may have gone meanwhile.
fn give(reply: Reply, response: Response<Body>) -> Ended {
    let status = response.status();
    match reply.send(Ok(response)) {
        Ok(()) => Ended::unused(status),
        Err(_) => Ended::unused(CLIENT_GONE),
    }
}

/// An error in the shape the API gives it.
fn error(status: StatusCode, kind: &str, message: &str) -> Response<Body> {
    let body = json!({"type": "error", "error": {"type": kind, "message": message}});
    http::with_type(status, "application/json", body.to_string())
}
