//! The scripted upstream: turns a step of a script into a response of each API, streamed or not.
//! Its only state is how often each scripted failure has happened.

mod chat;
mod conversation;
mod gemini;
mod messages;
mod requests;
mod responses;
mod stream_actions;
mod tools;

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use harvest_proto::{
    SessionId,
    event::Usage,
    script::{Block, ErrorStep, Script, ScriptError},
};
use hyper::{
    Response, StatusCode,
    header::{self, HeaderValue},
};
use serde_json::{Value, json};

use self::{
    conversation::{Conversation, NextStep, Tool},
    stream_actions::StreamAction,
};
use super::{CLIENT_GONE, Call, CallResult, Endpoint, Reply, error, respond, usage::Meter};
use crate::{
    http::{self, Abort, Body, BodySender},
    ledger::Used,
};

const DEFAULT_USAGE: Usage =
    Usage { input_tokens: 100, output_tokens: 20, cache_read_tokens: 0, cache_write_tokens: 0 };
// Failures are counted for this many steps; then counting starts over.
const MAX_COUNTED_STEPS: usize = 10_000;
const MODEL: &str = "scripted";

/// How often each scripted error or drop has happened, so that it can stop after a number of times.
#[derive(Default)]
pub(crate) struct FailureCounts(Mutex<HashMap<u64, u32>>);

impl FailureCounts {
    /// Counts a failure and returns the number of earlier ones.
    fn count(&self, session: &SessionId, next: &NextStep, block: usize) -> u32 {
        let mut hasher = DefaultHasher::new();
        (session, &next.prompt, next.position, next.step, block).hash(&mut hasher);
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= MAX_COUNTED_STEPS {
            counts.clear();
        }
        let count = counts.entry(hasher.finish()).or_default();
        *count += 1;
        *count - 1
    }
}

/// A part of a response.
#[derive(Debug, PartialEq)]
enum Part {
    Text { text: String, chunks: usize, delay: Duration },
    Thinking(String),
    Call { tool: Tool, input: Value },
    Hang(Duration),
    Drop,
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Answer { parts: Vec<Part>, usage: Usage },
    Error(ErrorStep),
}

/// Responds with the next step of the script.
pub(super) async fn answer(call: &Call, reply: Reply) -> CallResult {
    let endpoint = call.route.endpoint;
    if endpoint.is_catalog() {
        return respond(reply, models(call));
    }
    let mut conversation = match requests::parse(endpoint, &call.body) {
        Ok(conversation) => conversation,
        Err(problem) => {
            let message = format!("not a valid request of this API: {problem}");
            return respond(reply, labelled(call, invalid_request(&message)));
        }
    };
    if let Some(model) = call.route.model() {
        (conversation.model, conversation.stream) = (model.to_owned(), call.route.streams());
    }
    let tokens = call.body.len() / 4;
    match endpoint {
        Endpoint::CountTokens => {
            return respond(reply, document(call, &json!({ "input_tokens": tokens })));
        }
        Endpoint::GeminiCount => {
            return respond(reply, document(call, &json!({ "totalTokens": tokens })));
        }
        _ => {}
    }
    match outcome(call, &conversation) {
        Ok(Outcome::Answer { parts, usage }) if conversation.stream => {
            let actions = actions(endpoint, &parts, &conversation, usage);
            stream(call, actions, reply).await
        }
        Ok(Outcome::Answer { parts, usage }) => {
            let body = complete(endpoint, &parts, &conversation.model, usage);
            respond_complete(call, &parts, &body, usage, reply).await
        }
        Ok(Outcome::Error(step)) => {
            let status =
                StatusCode::from_u16(step.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            respond(reply, labelled(call, error(status, &step.kind, &step.message)))
        }
        Err(problem) => respond(reply, labelled(call, invalid_request(&problem.to_string()))),
    }
}

fn complete(endpoint: Endpoint, parts: &[Part], model: &str, usage: Usage) -> Value {
    match endpoint {
        Endpoint::Responses => responses::complete(parts, model, usage),
        Endpoint::Chat => chat::complete(parts, model, usage),
        Endpoint::Gemini => gemini::complete(parts, model, usage),
        _ => messages::complete(parts, model, usage),
    }
}

fn actions(
    endpoint: Endpoint,
    parts: &[Part],
    conversation: &Conversation,
    usage: Usage,
) -> Vec<StreamAction> {
    let Conversation { model, include_usage, .. } = conversation;
    match endpoint {
        Endpoint::Responses => responses::actions(parts, model, usage),
        Endpoint::Chat => chat::actions(parts, model, usage, *include_usage),
        Endpoint::Gemini => gemini::actions(parts, model, usage),
        _ => messages::actions(parts, model, usage),
    }
}

/// The list of models, or one of them, in a form that all SDKs read.
fn models(call: &Call) -> Response<Body> {
    let model = json!({
        "id": MODEL, "object": "model", "type": "model", "created": 0, "owned_by": "harvest",
        "display_name": "Scripted model", "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    });
    let path = call.route.target.split('?').next().unwrap_or_default();
    let named = path.strip_prefix("/models/");
    if call.route.endpoint == Endpoint::GeminiModels
        && let Some(models) = gemini::models(named)
    {
        return document(call, &models);
    }
    match named {
        None => document(
            call,
            &json!({
                "object": "list", "data": [model], "has_more": false, "first_id": MODEL,
                "last_id": MODEL,
            }),
        ),
        Some(MODEL) => document(call, &model),
        Some(other) => {
            let message = format!("there is no model `{other}`; the only one is `{MODEL}`");
            labelled(call, error(StatusCode::NOT_FOUND, "not_found_error", &message))
        }
    }
}

fn document(call: &Call, body: &Value) -> Response<Body> {
    labelled(call, http::with_type(StatusCode::OK, "application/json", body.to_string()))
}

fn invalid_request(message: &str) -> Response<Body> {
    error(StatusCode::BAD_REQUEST, "invalid_request_error", message)
}

fn outcome(call: &Call, conversation: &Conversation) -> Result<Outcome, ScriptError> {
    if let Some(text) = conversation.auxiliary() {
        let parts = vec![Part::Text { text, chunks: 1, delay: Duration::ZERO }];
        return Ok(Outcome::Answer { parts, usage: DEFAULT_USAGE });
    }
    let shared = &call.door.shared;
    let next = conversation.next_step();
    let script = Script::choose(&next.prompt, &shared.config.script_rules)?;
    let count = |block| shared.failures.count(&call.door.policy.session, &next, block);
    compose(script.answer(next.step), &next, &conversation.tools, count)
}

fn compose(
    blocks: Vec<Block>,
    next: &NextStep,
    offered: &[Tool],
    count: impl Fn(usize) -> u32,
) -> Result<Outcome, ScriptError> {
    let (mut parts, mut usage) = (Vec::new(), DEFAULT_USAGE);
    for (index, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Error(error) if count(index) < error.times => return Ok(Outcome::Error(error)),
            Block::Drop { times } if count(index) < times => parts.push(Part::Drop),
            Block::Error(_) | Block::Drop { .. } => {}
            Block::Usage(given) => usage = given,
            Block::Hang { seconds } => parts.push(Part::Hang(Duration::from_secs_f64(seconds))),
            Block::Text { text, chunks, delay_ms } => {
                parts.push(Part::Text { text, chunks, delay: Duration::from_millis(delay_ms) });
            }
            Block::Thinking(text) => parts.push(Part::Thinking(text)),
            Block::History => {
                let mut text = harvest_proto::script::history_text(next.earlier);
                if let Some([prompt, answer]) = &next.first {
                    text += &format!(" The first was “{prompt}”, answered with “{answer}”.");
                }
                parts.push(Part::Text { text, chunks: 1, delay: Duration::ZERO });
            }
            tool => {
                parts.push(tools::tool_call(tool, offered).map_err(|step| ScriptError::Step {
                    step: next.step + 1,
                    text: step.to_owned(),
                    problem: "the agent has no tool for this step".to_owned(),
                })?)
            }
        }
    }
    // Agents repeat a request whose response is empty; after a failure there may be nothing left.
    if !parts.iter().any(|part| matches!(part, Part::Text { .. } | Part::Call { .. })) {
        parts.push(Part::Text { text: "done".to_owned(), chunks: 1, delay: Duration::ZERO });
    }
    Ok(Outcome::Answer { parts, usage })
}

async fn stream(call: &Call, actions: Vec<StreamAction>, reply: Reply) -> CallResult {
    let (sender, body) = http::streamed();
    let mut response = labelled(call, Response::new(body));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if reply.send(Ok(response)).is_err() {
        return CallResult::unused(CLIENT_GONE);
    }
    let mut meter = Meter::new(call.route.endpoint, "text/event-stream", call.body.len());
    for action in actions {
        if !run(action, &sender, &mut meter).await {
            break;
        }
    }
    CallResult { status: StatusCode::OK, used: meter.used(true) }
}

// Returns false when the response has ended.
async fn run(action: StreamAction, sender: &BodySender, meter: &mut Meter) -> bool {
    match action {
        StreamAction::Send(text) => {
            meter.observe(text.as_bytes());
            sender.send(Ok(Bytes::from(text))).await.is_ok()
        }
        StreamAction::Count(text) => {
            meter.observe(text.as_bytes());
            true
        }
        StreamAction::Wait(time) => tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = sender.closed() => false,
        },
        StreamAction::Drop => {
            // The connection ends here, whether or not the agent is still connected.
            let _ = sender.send(Err(Abort.into())).await;
            false
        }
    }
}

async fn respond_complete(
    call: &Call,
    parts: &[Part],
    body: &Value,
    usage: Usage,
    mut reply: Reply,
) -> CallResult {
    for part in parts {
        match part {
            Part::Hang(time) => tokio::select! {
                () = tokio::time::sleep(*time) => {}
                () = reply.closed() => return CallResult::unused(CLIENT_GONE),
            },
            Part::Drop => {
                // The connection ends here, whether or not the agent is still connected.
                let _ = reply.send(Err(Abort));
                return CallResult::unused(StatusCode::OK);
            }
            Part::Text { .. } | Part::Thinking(_) | Part::Call { .. } => {}
        }
    }
    CallResult { used: Used::Counted(usage), ..respond(reply, document(call, body)) }
}

fn labelled(call: &Call, mut response: Response<Body>) -> Response<Body> {
    call.label(response.headers_mut());
    response
}
