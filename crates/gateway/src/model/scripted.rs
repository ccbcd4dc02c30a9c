//! The scripted upstream: turns a step of a script into a response of the Messages API, streamed or
//! not. Its only state is how often each scripted failure has happened.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use harvest_proto::{
    PromptId, SessionId,
    event::Usage,
    script::{Block, ErrorStep, Script, ScriptError, split_text},
};
use hyper::{
    Response, StatusCode,
    header::{self, HeaderValue},
};
use serde_json::{Value, json};

use super::{
    CLIENT_GONE, Call, CallResult, Endpoint, Reply, UPSTREAM,
    conversation::{Conversation, NextStep, Tool},
    error, respond,
    usage::Meter,
};
use crate::http::{self, Abort, Body, BodySender};

const DEFAULT_USAGE: Usage =
    Usage { input_tokens: 100, output_tokens: 20, cache_read_tokens: 0, cache_write_tokens: 0 };
// Failures are counted for this many steps; then counting starts over.
const MAX_COUNTED_STEPS: usize = 10_000;

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
    Call { name: String, input: Value },
    Hang(Duration),
    Drop,
}

/// An action of sending a streamed response.
#[derive(Debug, PartialEq)]
enum StreamAction {
    Send(String),
    Wait(Duration),
    Drop,
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Answer { parts: Vec<Part>, usage: Usage },
    Error(ErrorStep),
}

/// Responds with the next step of the script.
pub(super) async fn answer(call: &Call, reply: Reply) -> CallResult {
    let conversation: Conversation = match serde_json::from_slice(&call.body) {
        Ok(conversation) => conversation,
        Err(problem) => {
            let message = format!("not a valid request of the Messages API: {problem}");
            return respond(reply, labelled(invalid_request(&message)));
        }
    };
    if call.route.endpoint == Endpoint::CountTokens {
        let count = json!({"input_tokens": call.body.len() / 4});
        let response = http::with_type(StatusCode::OK, "application/json", count.to_string());
        return respond(reply, labelled(response));
    }
    match outcome(call, &conversation) {
        Ok(Outcome::Answer { parts, usage }) if conversation.stream => {
            stream(actions(&parts, &conversation.model, usage), reply).await
        }
        Ok(Outcome::Answer { parts, usage }) => {
            respond_complete(&parts, &conversation.model, usage, reply).await
        }
        Ok(Outcome::Error(step)) => {
            let status =
                StatusCode::from_u16(step.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            respond(reply, labelled(error(status, &step.kind, &step.message)))
        }
        Err(problem) => respond(reply, labelled(invalid_request(&problem.to_string()))),
    }
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
    tools: &[Tool],
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
                let text = harvest_proto::script::history_text(next.earlier);
                parts.push(Part::Text { text, chunks: 1, delay: Duration::ZERO });
            }
            tool => parts.push(tool_call(tool, tools).map_err(|step| ScriptError::Step {
                step: next.step + 1,
                text: step.to_owned(),
                problem: "the agent has no tool for this step".to_owned(),
            })?),
        }
    }
    // Agents repeat a request whose response is empty; after a failure there may be nothing left.
    if !parts.iter().any(|part| matches!(part, Part::Text { .. } | Part::Call { .. })) {
        parts.push(Part::Text { text: "done".to_owned(), chunks: 1, delay: Duration::ZERO });
    }
    Ok(Outcome::Answer { parts, usage })
}

// Agents have different names for tools and their arguments.
fn tool_call(block: Block, tools: &[Tool]) -> Result<Part, &'static str> {
    const PATH: [&str; 3] = ["file_path", "filePath", "path"];
    let offered = |names: &[&str]| tools.iter().find(|tool| names.contains(&tool.name.as_str()));
    let path_of = |tool: &Tool| tool.argument(&PATH).unwrap_or(PATH[0]);
    let (name, input) = match block {
        Block::Bash(command) => {
            let tool = offered(&["Bash", "bash"]).ok_or("bash")?;
            let mut input = json!({"command": command});
            if tool.argument(&["description"]).is_some() {
                input["description"] = json!("Run a scripted command");
            }
            (tool.name.clone(), input)
        }
        Block::Write { path, content } => {
            let tool = offered(&["Write", "write"]).ok_or("write")?;
            (tool.name.clone(), json!({path_of(tool): path, "content": content}))
        }
        Block::Read(path) => {
            let tool = offered(&["Read", "read"]).ok_or("read")?;
            (tool.name.clone(), json!({path_of(tool): path}))
        }
        Block::Edit { path, old, new } => {
            let tool = offered(&["Edit", "edit"]).ok_or("edit")?;
            let old_name = tool.argument(&["old_string", "oldString"]).unwrap_or("old_string");
            let new_name = tool.argument(&["new_string", "newString"]).unwrap_or("new_string");
            (tool.name.clone(), json!({path_of(tool): path, old_name: old, new_name: new}))
        }
        Block::Ask { question, options } => {
            let tool = offered(&["AskUserQuestion"]).ok_or("ask")?;
            let options: Vec<_> = options
                .iter()
                .map(|option| json!({"label": option, "description": option}))
                .collect();
            let question = json!({"question": question, "header": "Question", "options": options, "multiSelect": false});
            (tool.name.clone(), json!({"questions": [question]}))
        }
        // Even a tool that is not offered: agents load some tools only when they are called.
        Block::Tool { name, input } => (name, input),
        _ => return Err("a step for the scripted agent only"),
    };
    Ok(Part::Call { name, input })
}

fn content(part: &Part) -> Option<Value> {
    match part {
        Part::Text { text, .. } => Some(json!({"type": "text", "text": text})),
        Part::Thinking(text) => {
            Some(json!({"type": "thinking", "thinking": text, "signature": "c2NyaXB0ZWQ="}))
        }
        Part::Call { name, input } => {
            Some(json!({"type": "tool_use", "id": fresh_id("toolu"), "name": name, "input": input}))
        }
        Part::Hang(_) | Part::Drop => None,
    }
}

fn message(content: &[Value], model: &str, usage: Usage) -> Value {
    let calls = content.iter().any(|block| block["type"] == "tool_use");
    json!({
        "id": fresh_id("msg"), "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": if calls { "tool_use" } else { "end_turn" }, "stop_sequence": null, "usage": counts(usage),
    })
}

fn counts(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cache_read_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
    })
}

fn fresh_id(prefix: &str) -> String {
    // Our ids carry 60 random bits; two of them look like the API's in length.
    format!("{prefix}_{}{}", PromptId::random().part(), PromptId::random().part())
}

// The events of a streamed response, with the pauses between them.
fn actions(parts: &[Part], model: &str, usage: Usage) -> Vec<StreamAction> {
    let blocks: Vec<_> = parts.iter().map(content).collect();
    let content: Vec<_> = blocks.iter().flatten().cloned().collect();
    let full = message(&content, model, usage);
    let mut start = full.clone();
    start["content"] = json!([]);
    start["stop_reason"] = Value::Null;
    start["usage"]["output_tokens"] = json!(1);
    let mut actions = vec![
        event(json!({"type": "message_start", "message": start})),
        event(json!({"type": "ping"})),
    ];
    let mut index = 0;
    for (part, block) in parts.iter().zip(blocks) {
        match (part, block) {
            (Part::Hang(time), _) => actions.push(StreamAction::Wait(*time)),
            (Part::Drop, _) => {
                actions.push(StreamAction::Drop);
                return actions;
            }
            (part, Some(block)) => {
                block_actions(part, block, index, &mut actions);
                index += 1;
            }
            (_, None) => {}
        }
    }
    let delta = json!({"stop_reason": full["stop_reason"], "stop_sequence": null});
    let delta = json!({"type": "message_delta", "delta": delta, "usage": counts(usage)});
    actions.push(event(delta));
    actions.push(event(json!({"type": "message_stop"})));
    actions
}

fn block_actions(part: &Part, block: Value, index: usize, actions: &mut Vec<StreamAction>) {
    let mut pause = Duration::ZERO;
    let (begin, deltas) = match part {
        Part::Text { text, chunks, delay } => {
            pause = *delay;
            let deltas = split_text(text, *chunks)
                .into_iter()
                .map(|piece| json!({"type": "text_delta", "text": piece}))
                .collect();
            (json!({"type": "text", "text": ""}), deltas)
        }
        Part::Thinking(text) => {
            let texts = split_text(text, 2).into_iter();
            let mut deltas: Vec<_> =
                texts.map(|piece| json!({"type": "thinking_delta", "thinking": piece})).collect();
            deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
            (json!({"type": "thinking", "thinking": "", "signature": ""}), deltas)
        }
        Part::Call { input, .. } => {
            let input = input.to_string();
            let texts = split_text(&input, 3).into_iter();
            let deltas = texts
                .map(|piece| json!({"type": "input_json_delta", "partial_json": piece}))
                .collect();
            let mut begin = block;
            begin["input"] = json!({});
            (begin, deltas)
        }
        Part::Hang(_) | Part::Drop => return,
    };
    let begin = json!({"type": "content_block_start", "index": index, "content_block": begin});
    actions.push(event(begin));
    for delta in deltas {
        if !pause.is_zero() {
            actions.push(StreamAction::Wait(pause));
        }
        let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
        actions.push(event(delta));
    }
    actions.push(event(json!({"type": "content_block_stop", "index": index})));
}

fn event(data: Value) -> StreamAction {
    let name = data["type"].as_str().unwrap_or_default();
    StreamAction::Send(format!("event: {name}\ndata: {data}\n\n"))
}

async fn stream(actions: Vec<StreamAction>, reply: Reply) -> CallResult {
    let (sender, body) = http::streamed();
    let mut response = labelled(Response::new(body));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if reply.send(Ok(response)).is_err() {
        return CallResult::unused(CLIENT_GONE);
    }
    let mut meter = Meter::new(Endpoint::Messages, "text/event-stream", 0);
    for action in actions {
        if !run(action, &sender, &mut meter).await {
            break;
        }
    }
    CallResult { status: StatusCode::OK, usage: meter.usage() }
}

// Returns false when the response has ended.
async fn run(action: StreamAction, sender: &BodySender, meter: &mut Meter) -> bool {
    match action {
        StreamAction::Send(text) => {
            meter.observe(text.as_bytes());
            sender.send(Ok(Bytes::from(text))).await.is_ok()
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
    parts: &[Part],
    model: &str,
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
    let content: Vec<_> = parts.iter().filter_map(content).collect();
    let body = message(&content, model, usage).to_string();
    let result =
        respond(reply, labelled(http::with_type(StatusCode::OK, "application/json", body)));
    CallResult { usage, ..result }
}

fn labelled(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(UPSTREAM, HeaderValue::from_static("scripted"));
    response
}
