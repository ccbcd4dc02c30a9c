//! Interprets Codex's lines. Pure: a line in, signals out.

use harvest_proto::{
    EventBody,
    event::{McpServer, McpState, ToolKind},
};
use serde_json::{Value, json};

use super::{Codex, Purpose, TurnState};
use crate::{
    agents::{
        Signal, TOO_LONG, conversation, key_rejected, plan,
        rpc::{self, Message, RpcError, text},
        tool_calls::with_exit_code,
    },
    truncate,
};

// More than any user configures; a hostile agent must not grow the supervisor.
const MAX_SERVERS: usize = 64;

// A command that outlives its turn for longer is rare.
const MAX_ENDED_TURNS: usize = 64;

// Notifications about things that have no event.
const IGNORED: [&str; 16] = [
    "account/",
    "app/",
    "autoApprovalReview/",
    "command/",
    "configWarning",
    "deprecationNotice",
    "fs/",
    "hook/",
    "item/",
    "mcpServer/",
    "model/",
    "remoteControl/",
    "serverRequest/",
    "skills/",
    "thread/",
    "turn/",
];

impl Codex {
    pub(super) fn interpret(&mut self, line: &[u8]) -> Vec<Signal> {
        match Message::parse(line) {
            Some(Message::Request { id, method, params }) => self.requested(id, &method, &params),
            Some(Message::Response { id, result }) => match self.requests.close(id) {
                Some(purpose) => self.responded(purpose, result),
                None => self.unknown.record(line),
            },
            Some(Message::Notification { method, params }) => self.notified(&method, &params, line),
            None => self.unknown.record(line),
        }
    }

    /// Interprets a line of which only the beginning is known. Calls end with the turn at last.
    pub(super) fn interpret_head(&mut self, head: &[u8]) -> Vec<Signal> {
        match Message::of_head(head) {
            Some(Message::Request { id, .. }) => vec![Signal::Send(rpc::failure(&id, TOO_LONG))],
            Some(Message::Response { id, result }) => match self.requests.close(id) {
                Some(purpose) => self.responded(purpose, result),
                None => Vec::new(),
            },
            Some(Message::Notification { method, params })
                if method == "turn/completed" && self.is_our_thread(&params) =>
            {
                let current = match &self.turn {
                    TurnState::Running(id) => id.as_str(),
                    TurnState::Idle | TurnState::Starting => "",
                };
                let id = params["turn"]["id"].as_str().unwrap_or(current);
                self.turn_completed(&json!({"id": id, "error": {"message": TOO_LONG}}))
            }
            Some(Message::Notification { .. }) | None => Vec::new(),
        }
    }

    // Everything is allowed inside the sandbox.
    fn requested(&mut self, id: Value, method: &str, params: &Value) -> Vec<Signal> {
        let reply = match method {
            "item/commandExecution/requestApproval" | "item/fileChange/requestApproval" => {
                rpc::reply(&id, &json!({"decision": "accept"}))
            }
            "execCommandApproval" | "applyPatchApproval" => {
                rpc::reply(&id, &json!({"decision": "approved"}))
            }
            "mcpServer/elicitation/request" => rpc::reply(&id, &json!({"action": "decline"})),
            "item/tool/requestUserInput" => return self.questions.ask(id, params),
            _ => rpc::method_not_found(&id, method),
        };
        vec![Signal::Send(reply)]
    }

    fn responded(&mut self, purpose: Purpose, result: Result<Value, RpcError>) -> Vec<Signal> {
        match (purpose, result) {
            (Purpose::Initialize, Ok(result)) => self.initialized(&result),
            (Purpose::ModelList, Ok(result)) => {
                self.models.learn_defaults(&result);
                Vec::new()
            }
            (Purpose::New, Ok(result)) => self.opened(&result, true),
            (Purpose::Resume, Ok(result)) => self.opened(&result, false),
            (Purpose::Resume, Err(_)) => vec![Signal::Send(self.new_thread())],
            (Purpose::Initialize | Purpose::New, Err(error)) => {
                vec![Signal::Unrecoverable(error.message)]
            }
            (Purpose::Prompt, Ok(result)) => self.started(text(&result["turn"], "id")),
            (Purpose::Prompt, Err(error)) if self.turn == TurnState::Starting => {
                self.turn = TurnState::Idle;
                vec![Signal::Done(Err(error.message))]
            }
            // The turn has ended meanwhile; and without a list of models, a prompt keeps the model
            // of the one before it.
            (Purpose::Prompt | Purpose::Interrupt | Purpose::ModelList, _) => Vec::new(),
        }
    }

    fn opened(&mut self, result: &Value, is_new: bool) -> Vec<Signal> {
        let thread = text(&result["thread"], "id");
        if !conversation::is_id(thread) {
            let reason = "the agent gave no id of its conversation".to_owned();
            return vec![Signal::Unrecoverable(reason)];
        }
        thread.clone_into(&mut self.thread);
        self.models.opened(result);
        vec![Signal::Conversation(thread.to_owned()), self.ready_event(), Signal::Ready { is_new }]
    }

    // The reply to the prompt and a notification tell the id, in any order; the turn may be over by
    // the second one.
    fn started(&mut self, turn: &str) -> Vec<Signal> {
        if self.turn != TurnState::Starting || turn.is_empty() || !self.is_current(turn) {
            return Vec::new();
        }
        self.turn = TurnState::Running(turn.to_owned());
        if self.cancelled { vec![Signal::Send(self.interrupt(turn))] } else { Vec::new() }
    }

    fn is_current(&self, turn: &str) -> bool {
        match &self.turn {
            TurnState::Idle => false,
            TurnState::Starting => !self.ended_turns.iter().any(|ended| ended == turn),
            TurnState::Running(current) => current == turn,
        }
    }

    // Sub-agents have threads of their own, and report through their tool call.
    fn is_our_thread(&self, params: &Value) -> bool {
        params["threadId"].as_str().is_none_or(|thread| thread == self.thread)
    }

    fn notified(&mut self, method: &str, params: &Value, line: &[u8]) -> Vec<Signal> {
        if !self.is_our_thread(params) {
            return Vec::new();
        }
        // A command may outlive its turn, whose end has closed it.
        if params["turnId"].as_str().is_some_and(|turn| !self.is_current(turn)) {
            return vec![Signal::EarlierTurn];
        }
        let delta = || text(params, "delta").to_owned();
        let event = match method {
            "item/agentMessage/delta" => EventBody::TextDelta { text: delta() },
            "item/reasoning/summaryTextDelta" | "item/reasoning/textDelta" => {
                EventBody::ThoughtDelta { text: delta() }
            }
            "item/commandExecution/outputDelta" => {
                return self.tools.output(text(params, "itemId"), text(params, "delta"));
            }
            "item/started" => return self.item_started(&params["item"]),
            "item/completed" => return self.item_completed(&params["item"]),
            "turn/started" => return self.started(text(&params["turn"], "id")),
            "turn/completed" => return self.turn_completed(&params["turn"]),
            "turn/plan/updated" => match plan::plan(&params["plan"], "step") {
                Some(plan) => plan,
                None => return Vec::new(),
            },
            "thread/name/updated" if params["threadName"].is_string() => {
                EventBody::Title { title: text(params, "threadName").to_owned() }
            }
            "mcpServer/startupStatus/updated" => return self.server_changed(params),
            "error" => return retry(params),
            "warning" | "guardianWarning" => return Vec::new(),
            _ if IGNORED.iter().any(|ignored| method.starts_with(ignored)) => return Vec::new(),
            _ => return self.unknown.record(line),
        };
        vec![Signal::Event(event)]
    }

    fn item_started(&mut self, item: &Value) -> Vec<Signal> {
        let Some((name, kind, input)) = tool(item) else { return Vec::new() };
        let call = text(item, "id");
        let open = self.tools.open(call);
        open.set_name(&name);
        open.set_input(&input);
        open.kind = kind;
        self.tools.start(call)
    }

    fn item_completed(&mut self, item: &Value) -> Vec<Signal> {
        if text(item, "type") == "contextCompaction" {
            return vec![Signal::Event(EventBody::Compacted {})];
        }
        if tool(item).is_none() {
            return Vec::new();
        }
        let mut signals = self.item_started(item);
        let failed = ["failed", "declined"].contains(&text(item, "status"));
        signals.extend(self.tools.end(text(item, "id"), !failed, output(item)));
        signals
    }

    // Codex lets a command, such as a server, run on after the turn.
    fn turn_completed(&mut self, turn: &Value) -> Vec<Signal> {
        let id = text(turn, "id");
        if !self.is_current(id) {
            return Vec::new();
        }
        self.turn = TurnState::Idle;
        self.remember_end(id);
        let result = match text(turn, "status") {
            "completed" => Ok(()),
            "interrupted" => Err("the agent cancelled the turn".to_owned()),
            _ => Err(text(&turn["error"], "message").to_owned()),
        };
        let mut signals = self.tools.end_all(result.is_ok());
        signals.push(Signal::Done(result));
        signals
    }

    // Commands of these turns may still report. An unknown id is that of no turn.
    fn remember_end(&mut self, turn: &str) {
        if turn.is_empty() || turn.len() > truncate::MAX_NAME_BYTES {
            return;
        }
        if self.ended_turns.len() == MAX_ENDED_TURNS {
            self.ended_turns.pop_front();
        }
        self.ended_turns.push_back(turn.to_owned());
    }

    fn server_changed(&mut self, params: &Value) -> Vec<Signal> {
        let name = truncate::text(text(params, "name"), truncate::MAX_NAME_BYTES);
        let state = match text(params, "status") {
            "ready" => McpState::Connected,
            "starting" => McpState::Starting,
            _ => McpState::Failed,
        };
        self.mcp.retain(|server| server.name != name);
        if self.mcp.len() < MAX_SERVERS {
            self.mcp.push(McpServer { name, state });
        }
        if state == McpState::Starting { Vec::new() } else { vec![self.ready_event()] }
    }
}

/// Name, kind and input of an item that is a tool call.
fn tool(item: &Value) -> Option<(String, ToolKind, Value)> {
    let (name, kind, input) = match text(item, "type") {
        "commandExecution" => {
            let (kind, command) = command(item);
            ("shell".to_owned(), kind, json!({"command": command, "cwd": item["cwd"]}))
        }
        "fileChange" => {
            let changes = item["changes"].as_array().map_or(&[][..], Vec::as_slice);
            let path = changes.first().map_or("", |change| text(change, "path"));
            let input = json!({"path": path, "changes": item["changes"]});
            ("apply_patch".to_owned(), ToolKind::Edit, input)
        }
        "mcpToolCall" => {
            let name = format!("{}.{}", text(item, "server"), text(item, "tool"));
            (name, ToolKind::Other, item["arguments"].clone())
        }
        "dynamicToolCall" => {
            (text(item, "tool").to_owned(), ToolKind::Other, item["arguments"].clone())
        }
        "collabAgentToolCall" => {
            let input = json!({"prompt": item["prompt"]});
            (text(item, "tool").to_owned(), ToolKind::Think, input)
        }
        "webSearch" => ("web_search".to_owned(), ToolKind::Fetch, json!({"query": item["query"]})),
        "imageView" => ("view_image".to_owned(), ToolKind::Read, json!({"path": item["path"]})),
        _ => return None,
    };
    Some((name, kind, input))
}

// A command runs in a shell; its parsed actions have the command as the model wrote it.
fn command(item: &Value) -> (ToolKind, &str) {
    let actions = item["commandActions"].as_array().map_or(&[][..], Vec::as_slice);
    let [action] = actions else { return (ToolKind::Execute, text(item, "command")) };
    let kind = match text(action, "type") {
        "read" | "listFiles" => ToolKind::Read,
        "search" => ToolKind::Search,
        _ => ToolKind::Execute,
    };
    (kind, text(action, "command"))
}

fn output(item: &Value) -> String {
    let text_of = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text(item, "type") {
        "commandExecution" => {
            let output = text(item, "aggregatedOutput").to_owned();
            with_exit_code(output, item["exitCode"].as_i64())
        }
        "mcpToolCall" if !item["error"].is_null() => text(&item["error"], "message").to_owned(),
        "mcpToolCall" => {
            let blocks = item["result"]["content"].as_array().map_or(&[][..], Vec::as_slice);
            let block = |block: &Value| match text(block, "type") {
                "text" => text(block, "text").to_owned(),
                kind => format!("[{kind}]"),
            };
            blocks.iter().map(block).collect::<Vec<_>>().join("\n")
        }
        "dynamicToolCall" => text_of(&item["contentItems"]),
        "webSearch" => text_of(&item["results"]),
        _ => String::new(),
    }
}

// `Reconnecting... 2/5`. The final error comes with the end of the turn.
fn retry(params: &Value) -> Vec<Signal> {
    if !params["willRetry"].as_bool().unwrap_or(false) {
        return Vec::new();
    }
    let error = &params["error"];
    let info = error["codexErrorInfo"].as_object().and_then(|info| info.values().next());
    let status = info.and_then(|info| info["httpStatusCode"].as_u64());
    if status == Some(401) {
        return vec![Signal::Unrecoverable(key_rejected("OPENAI_API_KEY"))];
    }
    let digits = |letter: char| !letter.is_ascii_digit();
    let numbers = text(error, "message").split(digits).filter(|number| !number.is_empty());
    let attempt = numbers.map(str::parse).next().and_then(Result::ok).unwrap_or(1);
    let status = status.and_then(|status| u16::try_from(status).ok());
    vec![Signal::Event(EventBody::Retry { attempt, after_millis: 0, status })]
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
