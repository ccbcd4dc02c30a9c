//! Interprets the lines of an agent that speaks ACP. Pure: a line in, signals out.
//!
//! A turn ends when its prompt is answered *and* no tool call runs.

use harvest_proto::{Effort, EventBody, event::ToolKind};
use serde_json::{Value, json};

use super::{Acp, Purpose};
use crate::{
    agents::{
        Signal, TOO_LONG, ToolRequest, conversation, plan,
        rpc::{self, Message, RpcError, text},
        tool_calls::with_exit_code,
    },
    truncate,
};

// As many as the tool calls that may be open; a hostile agent must not grow the supervisor.
const MAX_ASKED: usize = 64;

impl Acp {
    pub(super) fn interpret(&mut self, line: &[u8]) -> Vec<Signal> {
        match Message::parse(line) {
            Some(Message::Request { id, method, params }) => {
                vec![self.answer_to(id, &method, &params)]
            }
            Some(Message::Response { id, result }) => match self.requests.close(id) {
                Some(purpose) => self.responded(purpose, result),
                None => self.unknown.record(line),
            },
            Some(Message::Notification { method, params }) if method == "session/update" => {
                self.updated(&params, line)
            }
            // Methods that begin with an underscore are extensions.
            Some(Message::Notification { method, .. }) if method.starts_with('_') => Vec::new(),
            Some(Message::Notification { .. }) | None => self.unknown.record(line),
        }
    }

    /// Interprets a line of which only the beginning is known.
    pub(super) fn interpret_head(&mut self, head: &[u8]) -> Vec<Signal> {
        match Message::of_head(head) {
            Some(Message::Request { id, .. }) => vec![Signal::Send(rpc::failure(&id, TOO_LONG))],
            Some(Message::Response { id, result }) => match self.requests.close(id) {
                Some(purpose) => self.responded(purpose, result),
                None => Vec::new(),
            },
            // It may have been the end of the last tool call.
            Some(Message::Notification { .. }) | None => self.ended(),
        }
    }

    // Everything is allowed inside the sandbox. Files and terminals are not offered.
    fn answer_to(&mut self, id: Value, method: &str, params: &Value) -> Signal {
        if method != "session/request_permission" {
            return Signal::Send(rpc::method_not_found(&id, method));
        }
        let options = &params["options"];
        if !self.asks_for_tools || self.asked.len() >= MAX_ASKED {
            return Signal::Send(rpc::reply(&id, &outcome_of(options, !self.asks_for_tools)));
        }
        let request = truncate::text(&id.to_string(), truncate::MAX_NAME_BYTES);
        let call = &params["toolCall"];
        let tool = ToolRequest {
            request: request.clone(),
            call: text(call, "toolCallId").to_owned(),
            kind: kind_of(text(call, "kind")),
        };
        self.asked.insert(request, (id, truncate::value(options.clone())));
        Signal::AsksForTool(tool)
    }

    /// Answers a permission request.
    pub(super) fn permit(&mut self, request: &str, allowed: bool) -> Vec<Signal> {
        let Some((id, options)) = self.asked.remove(request) else { return Vec::new() };
        vec![Signal::Send(rpc::reply(&id, &outcome_of(&options, allowed)))]
    }

    fn responded(&mut self, purpose: Purpose, result: Result<Value, RpcError>) -> Vec<Signal> {
        match (purpose, result) {
            (Purpose::Initialize, Ok(result)) => self.initialized(&result),
            (Purpose::New, Ok(result)) => {
                let session = text(&result, "sessionId");
                if conversation::is_id(session) {
                    return self.ready(session, &result, true);
                }
                vec![Signal::Unrecoverable("the agent gave no id of its conversation".to_owned())]
            }
            (Purpose::Resume, Ok(result)) => {
                let session = self.saved.clone().unwrap_or_default();
                self.ready(&session, &result, false)
            }
            (Purpose::Resume, Err(_)) => {
                self.replaying = false;
                vec![self.new_session()]
            }
            (Purpose::Initialize | Purpose::New, Err(error)) => {
                vec![Signal::Unrecoverable(error.message)]
            }
            (Purpose::Note, _) | (Purpose::SetEffort, Ok(_)) => Vec::new(),
            (Purpose::SetEffort, Err(error)) => vec![ignored("effort", &error.message)],
            (Purpose::SetModel, result) => {
                let mut signals = std::mem::take(&mut self.unreported);
                let refused = result.err().map(|error| ignored("model", &error.message));
                signals.splice(0..0, refused);
                signals
            }
            (Purpose::Prompt, Err(error)) => {
                let mut signals = self.tools.end_all(false);
                signals.push(Signal::Done(Err(cause(&error.message))));
                signals
            }
            (Purpose::Prompt, Ok(result)) => {
                self.reply = Some(outcome(text(&result, "stopReason")));
                self.ended()
            }
        }
    }

    // The end of the turn, if nothing is missing.
    fn ended(&mut self) -> Vec<Signal> {
        if self.tools.any_started() && !self.ends_missing {
            return Vec::new();
        }
        let Some(reply) = self.reply.take() else { return Vec::new() };
        let mut signals = self.tools.end_all(false);
        signals.push(Signal::Done(reply));
        signals
    }

    fn updated(&mut self, params: &Value, line: &[u8]) -> Vec<Signal> {
        // Sub-agents have conversations of their own, and report through their tool call.
        if self.replaying || text(params, "sessionId") != self.session {
            return Vec::new();
        }
        let update = &params["update"];
        match text(update, "sessionUpdate") {
            "agent_message_chunk" => chunk(update, |text| EventBody::TextDelta { text }),
            "agent_thought_chunk" => chunk(update, |text| EventBody::ThoughtDelta { text }),
            "tool_call" | "tool_call_update" => self.tool_updated(update),
            "plan" => {
                plan::plan(&update["entries"], "content").map(Signal::Event).into_iter().collect()
            }
            "session_info_update" => match text(update, "title") {
                "" => Vec::new(),
                title => vec![Signal::Event(EventBody::Title { title: title.to_owned() })],
            },
            "user_message_chunk"
            | "available_commands_update"
            | "current_mode_update"
            | "config_option_update"
            | "usage_update" => Vec::new(),
            _ => self.unknown.record(line),
        }
    }

    // A call is announced before its arguments are complete; it starts when it runs. An update may
    // describe a call after its end.
    fn tool_updated(&mut self, update: &Value) -> Vec<Signal> {
        let (call, status) = (text(update, "toolCallId"), text(update, "status"));
        let is_new = text(update, "sessionUpdate") == "tool_call";
        if status.is_empty() && !is_new && !self.tools.is_open(call) {
            return Vec::new();
        }
        let tool = self.tools.open(call);
        tool.set_name(text(update, "title"));
        if let Some(kind) = update["kind"].as_str() {
            tool.kind = kind_of(kind);
        }
        if update["rawInput"].is_object() {
            tool.set_input(&update["rawInput"]);
        }
        let output = output(&update["content"]);
        match status {
            "completed" | "failed" => {
                let plan = plan::in_tool_input(&tool.input()).map(Signal::Event);
                let mut signals = self.tool_ended(call, status == "completed", output, update);
                signals.extend(plan);
                signals.extend(self.ended());
                signals
            }
            "in_progress" => {
                let mut signals = self.tools.start(call);
                signals.extend(self.tools.output_so_far(call, &output));
                signals
            }
            _ => Vec::new(),
        }
    }

    fn tool_ended(&mut self, call: &str, ok: bool, output: String, update: &Value) -> Vec<Signal> {
        let raw = &update["rawOutput"];
        let code = raw["metadata"]["exit"].as_i64();
        let output = match (output.is_empty(), raw) {
            (true, Value::String(text)) => text.clone(),
            (true, raw) => text(raw, "output").to_owned(),
            (false, _) => output,
        };
        let ok = ok && code.unwrap_or(0) == 0;
        self.tools.end(call, ok, with_exit_code(output, code))
    }
}

/// The answer to a permission request with these options.
fn outcome_of(options: &Value, allowed: bool) -> Value {
    let kinds =
        if allowed { ["allow_always", "allow_once"] } else { ["reject_once", "reject_always"] };
    let options = options.as_array().map_or(&[][..], Vec::as_slice);
    let of_kind = |kind: &&str| options.iter().find(|option| text(option, "kind") == *kind);
    let outcome = match kinds.iter().find_map(of_kind) {
        Some(option) => json!({"outcome": "selected", "optionId": option["optionId"]}),
        None => json!({"outcome": "cancelled"}),
    };
    json!({"outcome": outcome})
}

fn chunk(update: &Value, body: impl Fn(String) -> EventBody) -> Vec<Signal> {
    match text(&update["content"], "text") {
        "" => Vec::new(),
        text => vec![Signal::Event(body(text.to_owned()))],
    }
}

// The name of the code -32603 in front of the agent's own words says nothing.
fn cause(message: &str) -> String {
    message.strip_prefix("Internal error: ").unwrap_or(message).to_owned()
}

fn outcome(stop_reason: &str) -> Result<(), String> {
    match stop_reason {
        "end_turn" => Ok(()),
        "cancelled" => Err("the agent cancelled the turn".to_owned()),
        "max_tokens" => Err("the model reached its limit of tokens".to_owned()),
        "max_turn_requests" => Err("the agent reached its limit of model calls".to_owned()),
        "refusal" => Err("the model refused to continue".to_owned()),
        _ => Err("the agent ended the turn for an unknown reason".to_owned()),
    }
}

fn kind_of(kind: &str) -> ToolKind {
    match kind {
        "delete" | "move" => ToolKind::Edit,
        kind => kind.parse().unwrap_or_default(),
    }
}

fn output(content: &Value) -> String {
    let blocks = content.as_array().map_or(&[][..], Vec::as_slice);
    let parts = blocks.iter().map(|block| match text(block, "type") {
        "content" => match text(&block["content"], "type") {
            "text" => text(&block["content"], "text").to_owned(),
            kind => format!("[{kind}]"),
        },
        "diff" => format!("[diff of {}]", text(block, "path")),
        kind => format!("[{kind}]"),
    });
    parts.collect::<Vec<_>>().join("\n")
}

/// The id of the option by which a conversation takes this effort.
pub(super) fn effort_option(opened: &Value, effort: Effort) -> Option<String> {
    let offers = |option: &&Value| {
        let values = option["options"].as_array().map_or(&[][..], Vec::as_slice);
        text(option, "category") == "thought_level"
            && values.iter().any(|value| text(value, "value") == effort.as_str())
    };
    let option = opened["configOptions"].as_array()?.iter().find(offers)?;
    Some(text(option, "id").to_owned())
}

pub(super) fn ignored(what: &str, why: &str) -> Signal {
    let message = format!("the {what} is ignored: {why}");
    Signal::Event(EventBody::Warning { message })
}

/// The model that a conversation uses.
pub(super) fn model(result: &Value) -> Option<String> {
    let options = result["configOptions"].as_array().map_or(&[][..], Vec::as_slice);
    let option = options.iter().find(|option| text(option, "id") == "model");
    let current = option.map_or_else(
        || text(&result["models"], "currentModelId"),
        |option| text(option, "currentValue"),
    );
    Some(current.to_owned()).filter(|model| !model.is_empty())
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
