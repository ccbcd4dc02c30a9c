//! Interprets Claude Code's lines. Pure: a line in, signals out.
//!
//! A turn ends when a `result` has arrived *and* the session is idle: after a result alone
//! sub-agents may still be running.

use std::collections::BTreeMap;

use harvest_proto::{
    EventBody, PromptId,
    event::{McpServer, McpState, ToolKind},
    json,
};
use serde_json::{Map, Value};

use super::{INITIALIZE, SET_EFFORT, TOOL_HOOK, allow, deny, not_supported, uuid};
use crate::{
    agents::{
        NO_ANSWER, Signal, TOO_LONG, ToolRequest, closed_unanswered, dropped_line, key_rejected,
        may_ask, plan,
        unknown_lines::{MAX_RAW_BYTES, UnknownLines},
    },
    truncate,
};

/// The state of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Claude {
    command: Option<String>,
    pub(super) resumes: bool,
    /// The model of the command line.
    pub(super) model: Option<String>,
    /// Whether a hook asks before each tool.
    pub(super) asks_for_tools: bool,
    started: bool,
    result: Option<Result<(), String>>,
    /// Whether the prompt has caused text.
    streamed: bool,
    /// The last `AgentReady`.
    reported: Option<EventBody>,
    pub(super) questions: BTreeMap<String, PendingQuestions>,
    unknown: UnknownLines,
}

/// A tool call that waits for the user's answers.
#[derive(Debug)]
pub(super) struct PendingQuestions {
    control: String,
    input: Map<String, Value>,
    /// The remaining questions; the first one is open.
    questions: Vec<Value>,
    answers: Map<String, Value>,
}

impl Claude {
    /// Called at the start of a prompt.
    pub(super) fn begin(&mut self, prompt: &PromptId) {
        self.command = Some(uuid(prompt));
        (self.started, self.streamed) = (false, false);
        self.result = None;
        self.unknown.reset();
    }

    pub(super) fn interpret(&mut self, line: &[u8]) -> Vec<Signal> {
        let Ok(message) = json::from_slice::<Value>(line) else {
            return self.unknown.record(line);
        };
        match text(&message, "type") {
            "system" => self.system(&message, line),
            "stream_event" => {
                let signals = partial(&message);
                self.streamed |= !signals.is_empty();
                signals
            }
            "assistant" => tools_started(&message),
            "user" => tools_ended(&message),
            "result" => self.ended(&message),
            "command_lifecycle" => self.lifecycle(&message),
            "control_request" => self.requested(&message),
            "control_cancel_request" => self.cancelled(&message),
            "control_response" => self.responded(&message["response"]),
            "keep_alive" | "rate_limit_event" | "tool_progress" | "auth_status"
            | "tool_use_summary" => Vec::new(),
            _ => self.unknown.record(line),
        }
    }

    /// Interprets a line of which only the beginning is known.
    pub(super) fn interpret_head(&mut self, head: &[u8]) -> Vec<Signal> {
        let message = Value::Object(dropped_line::fields(head));
        match text(&message, "type") {
            "result" => self.result = Some(Err(TOO_LONG.to_owned())),
            "control_request" => {
                let (control, request) = (text(&message, "request_id"), &message["request"]);
                // An error as the answer would let the tool run.
                return match text(request, "subtype") {
                    "hook_callback" => vec![asks_for_tool(control, request)],
                    _ => vec![Signal::Send(not_supported(control))],
                };
            }
            _ => {}
        }
        Vec::new()
    }

    fn system(&mut self, message: &Value, line: &[u8]) -> Vec<Signal> {
        match text(message, "subtype") {
            "session_state_changed" if text(message, "state") == "idle" => self.idle(),
            "api_retry" => retry(message),
            "init" => self.initialized(message),
            "compact_boundary" => vec![Signal::Event(EventBody::Compacted {})],
            "status"
            | "session_state_changed"
            | "background_tasks_changed"
            | "thinking_tokens"
            | "task_started"
            | "task_progress"
            | "task_updated"
            | "task_notification"
            | "hook_started"
            | "hook_progress"
            | "hook_response" => Vec::new(),
            _ => self.unknown.record(line),
        }
    }

    // Claude Code repeats this line in every turn.
    fn initialized(&mut self, message: &Value) -> Vec<Signal> {
        let field = |name| Some(text(message, name).to_owned()).filter(|text| !text.is_empty());
        let servers = message["mcp_servers"].as_array().map_or(&[][..], Vec::as_slice);
        let server = |server: &Value| McpServer {
            name: text(server, "name").to_owned(),
            state: match text(server, "status") {
                "connected" => McpState::Connected,
                "pending" => McpState::Starting,
                _ => McpState::Failed,
            },
        };
        let ready = EventBody::AgentReady {
            version: field("claude_code_version"),
            model: field("model"),
            mcp: servers.iter().map(server).collect(),
        };
        if self.reported.as_ref() == Some(&ready) {
            return Vec::new();
        }
        self.reported = Some(ready.clone());
        vec![Signal::Event(ready)]
    }

    fn responded(&self, response: &Value) -> Vec<Signal> {
        let succeeded = text(response, "subtype") == "success";
        match (text(response, "request_id"), succeeded) {
            (INITIALIZE, true) => vec![Signal::Ready { is_new: !self.resumes }],
            (SET_EFFORT, false) => {
                let why = truncate::text(text(response, "error"), MAX_RAW_BYTES);
                let message = format!("Claude Code refuses the effort of this prompt: {why}");
                vec![Signal::Event(EventBody::Warning { message })]
            }
            _ => Vec::new(),
        }
    }

    // The output of a command such as `/context` is not streamed; the result is all there is.
    fn ended(&mut self, message: &Value) -> Vec<Signal> {
        let outcome = outcome(message);
        let text = text(message, "result").to_owned();
        let unseen = outcome.is_ok() && !text.is_empty() && !self.streamed;
        self.result = Some(outcome);
        unseen.then_some(Signal::Event(EventBody::TextDelta { text })).into_iter().collect()
    }

    fn idle(&mut self) -> Vec<Signal> {
        self.result.take().map(Signal::Done).into_iter().collect()
    }

    // A repeated prompt completes without having started, and without a result.
    fn lifecycle(&mut self, message: &Value) -> Vec<Signal> {
        if self.command.as_deref() != Some(text(message, "command_uuid")) {
            return Vec::new();
        }
        match text(message, "state") {
            "started" => self.started = true,
            "completed" if !self.started && self.result.is_none() => {
                return vec![Signal::Repeated];
            }
            _ => {}
        }
        Vec::new()
    }

    fn requested(&mut self, message: &Value) -> Vec<Signal> {
        let control = text(message, "request_id");
        let request = &message["request"];
        if text(request, "subtype") == "hook_callback" && text(request, "callback_id") == TOOL_HOOK
        {
            return vec![asks_for_tool(control, request)];
        }
        if text(request, "subtype") != "can_use_tool" {
            return vec![Signal::Send(not_supported(control))];
        }
        let input = request["input"].as_object().cloned().unwrap_or_default();
        let questions =
            input.get("questions").and_then(Value::as_array).cloned().unwrap_or_default();
        if text(request, "tool_name") != "AskUserQuestion" || questions.is_empty() {
            return vec![Signal::Send(allow(control, &request["input"]))];
        }
        if !may_ask(self.questions.len(), message) {
            return vec![Signal::Send(deny(control, NO_ANSWER))];
        }
        let name = match text(request, "tool_use_id") {
            "" => control,
            call => call,
        };
        // The event and the answer use this id, which must be short.
        let name = truncate::text(name, truncate::MAX_NAME_BYTES);
        let pending =
            PendingQuestions { control: control.to_owned(), input, questions, answers: Map::new() };
        self.ask(name, pending)
    }

    // Asks the first remaining question. Open questions are kept apart.
    fn ask(&mut self, mut name: String, pending: PendingQuestions) -> Vec<Signal> {
        while self.questions.contains_key(&name) {
            name.push('+');
        }
        let signals = ask(&name, &pending);
        self.questions.insert(name, pending);
        signals
    }

    /// Handles the answer to the open question: asks the next one, or replies to the tool call.
    pub(super) fn on_answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        let Some(mut pending) = self.questions.remove(request) else { return Vec::new() };
        let question = text(&pending.questions.remove(0), "question").to_owned();
        pending.answers.insert(question, Value::from(answer));
        let closed = EventBody::RequestClosed {
            request: request.to_owned(),
            answer: Some(answer.to_owned()),
        };
        let mut signals = vec![Signal::Event(closed)];
        if pending.questions.is_empty() {
            pending.input.insert("answers".to_owned(), Value::Object(pending.answers));
            signals.push(Signal::Send(allow(&pending.control, &Value::Object(pending.input))));
        } else {
            // Each question is a separate request outside.
            signals.extend(self.ask(format!("{request}+"), pending));
        }
        signals
    }

    pub(super) fn close_all(&mut self) -> Vec<Signal> {
        let close = |(request, pending): (String, PendingQuestions)| {
            closed_unanswered(request, deny(&pending.control, NO_ANSWER))
        };
        std::mem::take(&mut self.questions).into_iter().flat_map(close).collect()
    }

    fn cancelled(&mut self, message: &Value) -> Vec<Signal> {
        let control = text(message, "request_id");
        let closed = self.questions.extract_if(.., |_, pending| pending.control == control);
        let withdrawn = Signal::ToolWithdrawn { request: control.to_owned() };
        closed
            .map(|(request, _)| Signal::Event(EventBody::RequestClosed { request, answer: None }))
            .chain([withdrawn])
            .collect()
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn asks_for_tool(control: &str, request: &Value) -> Signal {
    let input = &request["input"];
    Signal::AsksForTool(ToolRequest {
        request: control.to_owned(),
        call: text(input, "tool_use_id").to_owned(),
        kind: kind(text(input, "tool_name")),
    })
}

fn ask(name: &str, pending: &PendingQuestions) -> Vec<Signal> {
    let Some(question) = pending.questions.first() else { return Vec::new() };
    let options = question["options"].as_array().map_or(&[][..], Vec::as_slice);
    let opened = EventBody::RequestOpened {
        request: name.to_owned(),
        question: text(question, "question").to_owned(),
        options: options.iter().map(|option| text(option, "label").to_owned()).collect(),
    };
    vec![Signal::Event(opened), Signal::Question { request: name.to_owned() }]
}

// Only the main conversation is streamed; sub-agents report through the result of their tool call.
fn partial(message: &Value) -> Vec<Signal> {
    let delta = &message["event"]["delta"];
    if !message["parent_tool_use_id"].is_null() {
        return Vec::new();
    }
    let field = |name| Some(text(delta, name).to_owned()).filter(|text| !text.is_empty());
    let event = match text(delta, "type") {
        "text_delta" => field("text").map(|text| EventBody::TextDelta { text }),
        "thinking_delta" => field("thinking").map(|text| EventBody::ThoughtDelta { text }),
        _ => None,
    };
    event.map(Signal::Event).into_iter().collect()
}

fn blocks<'a>(message: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    let content = message["message"]["content"].as_array().map_or(&[][..], Vec::as_slice);
    content.iter().filter(move |block| text(block, "type") == kind)
}

fn tools_started(message: &Value) -> Vec<Signal> {
    let parent = message["parent_tool_use_id"].as_str();
    let started = |block: &Value| {
        let (name, input) = (text(block, "name"), &block["input"]);
        let started = EventBody::ToolStarted {
            call: text(block, "id").to_owned(),
            name: name.to_owned(),
            kind: kind(name),
            input: input.clone(),
            parent: parent.map(str::to_owned),
            blob: None,
        };
        // The plan of a sub-agent is not the plan of the turn.
        let plan = plan::in_tool_input(input).filter(|_| parent.is_none());
        std::iter::once(started).chain(plan).map(Signal::Event).collect::<Vec<_>>()
    };
    blocks(message, "tool_use").flat_map(started).collect()
}

fn kind(tool: &str) -> ToolKind {
    match tool {
        "Bash" | "BashOutput" | "KillShell" => ToolKind::Execute,
        "Read" | "NotebookRead" | "LS" => ToolKind::Read,
        "Edit" | "MultiEdit" | "Write" | "NotebookEdit" => ToolKind::Edit,
        "Grep" | "Glob" | "ToolSearch" => ToolKind::Search,
        "WebFetch" | "WebSearch" => ToolKind::Fetch,
        "Agent" | "Task" | "TodoWrite" => ToolKind::Think,
        _ => ToolKind::Other,
    }
}

fn tools_ended(message: &Value) -> Vec<Signal> {
    blocks(message, "tool_result")
        .map(|block| {
            Signal::Event(EventBody::ToolEnded {
                call: text(block, "tool_use_id").to_owned(),
                ok: !block["is_error"].as_bool().unwrap_or(false),
                output: output(&block["content"]),
                blob: None,
            })
        })
        .collect()
}

fn output(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => {
            let parts = blocks.iter().map(|block| match text(block, "type") {
                "text" => text(block, "text").to_owned(),
                kind => format!("[{kind}]"),
            });
            parts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

fn retry(message: &Value) -> Vec<Signal> {
    let status = message["error_status"].as_u64().and_then(|status| u16::try_from(status).ok());
    // The agent would retry ten times over minutes, but an invalid key stays invalid.
    if status == Some(401) {
        return vec![Signal::Unrecoverable(key_rejected("ANTHROPIC_API_KEY"))];
    }
    let number = |field: &str| message[field].as_f64().unwrap_or(0.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "small positive numbers from the agent"
    )]
    let event = EventBody::Retry {
        attempt: number("attempt") as u32,
        after_millis: number("retry_delay_ms") as u64,
        status,
    };
    vec![Signal::Event(event)]
}

// An API failure has the subtype `success` and `is_error`: only the latter counts.
fn outcome(message: &Value) -> Result<(), String> {
    if !message["is_error"].as_bool().unwrap_or(false) {
        return Ok(());
    }
    let errors = message["errors"].as_array().map_or(&[][..], Vec::as_slice);
    let texts =
        [text(message, "result"), errors.first().and_then(Value::as_str).unwrap_or_default()];
    let text_found = texts.into_iter().find(|text| !text.is_empty());
    Err(truncate::text(text_found.unwrap_or_else(|| text(message, "subtype")), MAX_RAW_BYTES))
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
