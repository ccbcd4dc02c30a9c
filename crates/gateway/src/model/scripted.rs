//! The scripted upstream: turns a step of a script into an answer of the Messages API, streamed or not.
//! No model, no key, no cost. The only thing it remembers is how often a mishap has happened.

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
    script::{Block, ErrorStep, Script, ScriptError, pieces},
};
use hyper::{
    Response, StatusCode,
    header::{self, HeaderName, HeaderValue},
};
use serde_json::{Value, json};

use super::{
    CLIENT_GONE, Call, Ended, Question, Reply,
    conversation::{Conversation, Due, Tool},
    error, give,
    usage::Meter,
};
use crate::http::{self, Body, Cut, Feed};

const UPSTREAM: HeaderName = HeaderName::from_static("x-harvest-upstream");
const DEFAULT_USAGE: Usage =
    Usage { input_tokens: 100, output_tokens: 20, cache_read_tokens: 0, cache_write_tokens: 0 };
// Mishaps are counted for this many steps; past that, counting begins anew.
const MAX_MISHAPS: usize = 10_000;

/// How often each scripted error or cut has happened, so that it can stop happening.
#[derive(Debug, Default)]
pub(crate) struct Mishaps(Mutex<HashMap<u64, u32>>);

impl Mishaps {
    /// Counts one more and says how many there were before.
    fn count(&self, session: &SessionId, due: &Due, block: usize) -> u32 {
        let mut hasher = DefaultHasher::new();
        (session, &due.prompt, due.position, due.step, block).hash(&mut hasher);
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= MAX_MISHAPS {
            counts.clear();
        }
        let count = counts.entry(hasher.finish()).or_default();
        *count += 1;
        *count - 1
    }
}

/// One part of an answer, ready to be sent.
#[derive(Debug, PartialEq)]
enum Part {
    Text { text: String, chunks: usize, delay: Duration },
    Thinking(String),
    Call { name: String, input: Value },
    Hang(Duration),
    Cut,
}

/// What sending an answer consists of.
#[derive(Debug, PartialEq)]
enum Cue {
    Send(String),
    Wait(Duration),
    Cut,
}

/// What a request gets.
#[derive(Debug, PartialEq)]
enum Outcome {
    Answer { parts: Vec<Part>, usage: Usage },
    Error(ErrorStep),
}

/// Plays the step that is due.
pub(super) async fn answer(call: &Call, reply: Reply) -> Ended {
    let conversation: Conversation = match serde_json::from_slice(&call.body) {
        Ok(conversation) => conversation,
        Err(problem) => {
            let message = format!("the request is not one of the Messages API: {problem}");
            return give(
                reply,
                labelled(error(StatusCode::BAD_REQUEST, "invalid_request_error", &message)),
            );
        }
    };
    if call.question == Question::CountTokens {
        let count = json!({"input_tokens": call.body.len() / 4});
        return give(
            reply,
            labelled(http::with_type(StatusCode::OK, "application/json", count.to_string())),
        );
    }
    match outcome(call, &conversation) {
        Ok(Outcome::Answer { parts, usage }) if conversation.stream => {
            stream(cues(&parts, &conversation.model, usage), reply).await
        }
        Ok(Outcome::Answer { parts, usage }) => {
            whole(&parts, &conversation.model, usage, reply).await
        }
        Ok(Outcome::Error(step)) => {
            let status =
                StatusCode::from_u16(step.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            give(reply, labelled(error(status, &step.kind, &step.message)))
        }
        Err(problem) => {
            let message = problem.to_string();
            give(reply, labelled(error(StatusCode::BAD_REQUEST, "invalid_request_error", &message)))
        }
    }
}

fn outcome(call: &Call, conversation: &Conversation) -> Result<Outcome, ScriptError> {
    if let Some(text) = conversation.auxiliary() {
        let parts = vec![Part::Text { text, chunks: 1, delay: Duration::ZERO }];
        return Ok(Outcome::Answer { parts, usage: DEFAULT_USAGE });
    }
    let shared = &call.door.shared;
    let due = conversation.due();
    let script = Script::choose(&due.prompt, &shared.config.script_rules)?;
    let count = |block| shared.mishaps.count(&call.session, &due, block);
    compose(script.answer(due.step), &due, &conversation.tools, count)
}

fn compose(
    blocks: Vec<Block>,
    due: &Due,
    tools: &[Tool],
    count: impl Fn(usize) -> u32,
) -> Result<Outcome, ScriptError> {
    let (mut parts, mut usage) = (Vec::new(), DEFAULT_USAGE);
    for (index, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Error(error) if count(index) < error.times => return Ok(Outcome::Error(error)),
            Block::Drop { times } if count(index) < times => parts.push(Part::Cut),
            Block::Error(_) | Block::Drop { .. } => {}
            Block::Usage(given) => usage = given,
            Block::Hang { seconds } => parts.push(Part::Hang(Duration::from_secs_f64(seconds))),
            Block::Text { text, chunks, delay_ms } => {
                parts.push(Part::Text { text, chunks, delay: Duration::from_millis(delay_ms) });
            }
            Block::Thinking(text) => parts.push(Part::Thinking(text)),
            Block::History => {
                let text = harvest_proto::script::remembered(due.earlier);
                parts.push(Part::Text { text, chunks: 1, delay: Duration::ZERO });
            }
            tool => parts.push(tool_call(tool, tools).map_err(|wanted| ScriptError::Step {
                step: due.step + 1,
                text: wanted.to_owned(),
                problem: "the agent offers no tool for it".to_owned(),
            })?),
        }
    }
    // An answer with nothing to see makes agents ask again; after a mishap there may be nothing left.
    if !parts.iter().any(|part| matches!(part, Part::Text { .. } | Part::Call { .. })) {
        parts.push(Part::Text { text: "done".to_owned(), chunks: 1, delay: Duration::ZERO });
    }
    Ok(Outcome::Answer { parts, usage })
}

// Which tool a step means and how that tool calls its arguments differs from agent to agent.
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
        // By name, offered or not: agents keep some tools back until they are called.
        Block::Tool { name, input } => (name, input),
        _ => return Err("a step that only the scripted agent plays"),
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
        Part::Hang(_) | Part::Cut => None,
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

// The whole answer as a list of things to send and moments to wait.
fn cues(parts: &[Part], model: &str, usage: Usage) -> Vec<Cue> {
    let blocks: Vec<_> = parts.iter().map(content).collect();
    let content: Vec<_> = blocks.iter().flatten().cloned().collect();
    let full = message(&content, model, usage);
    let mut start = full.clone();
    start["content"] = json!([]);
    start["stop_reason"] = Value::Null;
    start["usage"]["output_tokens"] = json!(1);
    let mut cues = vec![
        event("message_start", json!({"type": "message_start", "message": start})),
        event("ping", json!({"type": "ping"})),
    ];
    let mut index = 0;
    for (part, block) in parts.iter().zip(blocks) {
        match (part, block) {
            (Part::Hang(time), _) => cues.push(Cue::Wait(*time)),
            (Part::Cut, _) => {
                cues.push(Cue::Cut);
                return cues;
            }
            (part, Some(block)) => {
                block_cues(part, block, index, &mut cues);
                index += 1;
            }
            (_, None) => {}
        }
    }
    let delta = json!({"stop_reason": full["stop_reason"], "stop_sequence": null});
    cues.push(event(
        "message_delta",
        json!({"type": "message_delta", "delta": delta, "usage": counts(usage)}),
    ));
    cues.push(event("message_stop", json!({"type": "message_stop"})));
    cues
}

fn block_cues(part: &Part, block: Value, index: usize, cues: &mut Vec<Cue>) {
    let mut pause = Duration::ZERO;
    let (begin, deltas) = match part {
        Part::Text { text, chunks, delay } => {
            pause = *delay;
            let deltas = pieces(text, *chunks)
                .into_iter()
                .map(|piece| json!({"type": "text_delta", "text": piece}))
                .collect();
            (json!({"type": "text", "text": ""}), deltas)
        }
        Part::Thinking(text) => {
            let texts = pieces(text, 2).into_iter();
            let mut deltas: Vec<_> =
                texts.map(|piece| json!({"type": "thinking_delta", "thinking": piece})).collect();
            deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
            (json!({"type": "thinking", "thinking": "", "signature": ""}), deltas)
        }
        Part::Call { input, .. } => {
            let input = input.to_string();
            let texts = pieces(&input, 3).into_iter();
            let deltas = texts
                .map(|piece| json!({"type": "input_json_delta", "partial_json": piece}))
                .collect();
            let mut begin = block;
            begin["input"] = json!({});
            (begin, deltas)
        }
        Part::Hang(_) | Part::Cut => return,
    };
    let begin = json!({"type": "content_block_start", "index": index, "content_block": begin});
    cues.push(event("content_block_start", begin));
    for delta in deltas {
        if !pause.is_zero() {
            cues.push(Cue::Wait(pause));
        }
        let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
        cues.push(event("content_block_delta", delta));
    }
    cues.push(event("content_block_stop", json!({"type": "content_block_stop", "index": index})));
}

fn event(name: &str, data: Value) -> Cue {
    Cue::Send(format!("event: {name}\ndata: {data}\n\n"))
}

async fn stream(cues: Vec<Cue>, reply: Reply) -> Ended {
    let (feed, body) = http::streamed();
    let mut response = labelled(Response::new(body));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if reply.send(Ok(response)).is_err() {
        return Ended::unused(CLIENT_GONE);
    }
    let mut meter = Meter::new("text/event-stream");
    for cue in cues {
        if !play(cue, &feed, &mut meter).await {
            break;
        }
    }
    Ended { status: StatusCode::OK, usage: meter.usage() }
}

// Says whether there is still somebody to play for.
async fn play(cue: Cue, feed: &Feed, meter: &mut Meter) -> bool {
    match cue {
        Cue::Send(text) => {
            meter.pass(text.as_bytes());
            feed.send(Ok(Bytes::from(text))).await.is_ok()
        }
        Cue::Wait(time) => tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = feed.closed() => false,
        },
        Cue::Cut => {
            // Whether the agent still listens or not, the connection ends here.
            let _ = feed.send(Err(Cut.into())).await;
            false
        }
    }
}

async fn whole(parts: &[Part], model: &str, usage: Usage, mut reply: Reply) -> Ended {
    for part in parts {
        match part {
            Part::Hang(time) => tokio::select! {
                () = tokio::time::sleep(*time) => {}
                () = reply.closed() => return Ended::unused(CLIENT_GONE),
            },
            Part::Cut => {
                // As above: the connection ends in either case.
                let _ = reply.send(Err(Cut));
                return Ended::unused(StatusCode::OK);
            }
            Part::Text { .. } | Part::Thinking(_) | Part::Call { .. } => {}
        }
    }
    let content: Vec<_> = parts.iter().filter_map(content).collect();
    let body = message(&content, model, usage).to_string();
    let ended = give(reply, labelled(http::with_type(StatusCode::OK, "application/json", body)));
    Ended { usage, ..ended }
}

fn labelled(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(UPSTREAM, HeaderValue::from_static("scripted"));
    response
}
