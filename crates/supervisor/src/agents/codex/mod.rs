//! Codex over its `app-server` protocol: its command line and the requests sent to it. `map.rs`
//! interprets its own lines. Tested with 0.166.0.
//!
//! ```text
//! initialize ─▶ thread/resume ──error──▶ thread/start ─▶ ready ─▶ turn/start…
//!            └─ without a saved conversation ─▶
//! ```

mod map;
mod models;
mod questions;

use std::collections::VecDeque;

use harvest_proto::{
    EventBody, UpstreamName,
    bridge::{AgentLaunch, TurnRequest},
    door::model_url,
    event::McpServer,
};
use serde_json::{Value, json};

use self::{models::Models, questions::Questions};
use super::{
    Agent, AgentStart, Image, Invocation, Signal, owned, rpc, rpc::OpenRequests,
    tool_calls::ToolCalls, unknown_lines::UnknownLines,
};
use crate::app::instructions;

/// The key is a placeholder: the gateway holds the real one.
const ENV: [(&str, &str); 1] = [("OPENAI_API_KEY", "held-by-the-gateway")];

/// The configuration, as values of `-c`. Flags leave `~/.codex/config.toml` to the user.
const CONFIG: [(&str, &str); 9] = [
    ("model_provider", r#""harvest""#),
    ("approval_policy", r#""never""#),
    // The sandbox around it is ours.
    ("sandbox_mode", r#""danger-full-access""#),
    ("check_for_update_on_startup", "false"),
    // The gateway refuses tools that the model service would run.
    ("web_search", r#""disabled""#),
    ("analytics.enabled", "false"),
    // Otherwise it looks for plugins at several hosts.
    ("features.plugins", "false"),
    ("history.persistence", r#""none""#),
    ("mcp_servers.harvest", TOOLS),
];

/// Harvest's own tools, at their door.
const TOOLS: &str = r#"{ url = "http://mcp.harvest.internal/mcp" }"#;

fn provider(upstream: &UpstreamName) -> String {
    let url = model_url(upstream);
    format!(
        concat!(
            r#"{{ name = "Harvest", base_url = "{}/v1", env_key = "OPENAI_API_KEY", "#,
            r#"wire_api = "responses", supports_websockets = false, request_max_retries = 4, "#,
            r#"stream_max_retries = 10 }}"#
        ),
        url
    )
}

/// The state of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Codex {
    requests: OpenRequests<Purpose>,
    cwd: String,
    /// The conversation to resume.
    saved: Option<String>,
    thread: String,
    turn: TurnState,
    /// The last turns that ended, oldest first.
    ended_turns: VecDeque<String>,
    /// Whether the turn is to be interrupted as soon as it has an id.
    cancelled: bool,
    version: Option<String>,
    models: Models,
    mcp: Vec<McpServer>,
    tools: ToolCalls,
    questions: Questions,
    unknown: UnknownLines,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum TurnState {
    #[default]
    Idle,
    /// The prompt was sent; the id of its turn is not known yet.
    Starting,
    Running(String),
}

/// What a request was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Initialize,
    ModelList,
    /// Continue the saved conversation.
    Resume,
    New,
    Prompt,
    Interrupt,
}

impl Agent for Codex {
    fn invocation(&mut self, start: &AgentStart<'_>) -> Invocation {
        start.cwd.clone_into(&mut self.cwd);
        self.saved.clone_from(&start.conversation);
        self.models.want(start.launch);
        Invocation { argv: argv(start.launch), env: owned(&ENV), warning: None }
    }

    fn init_line(&mut self) -> Option<String> {
        let client =
            json!({"name": "harvest", "title": "Harvest", "version": env!("CARGO_PKG_VERSION")});
        let params = json!({"clientInfo": client, "capabilities": {"experimentalApi": true}});
        Some(self.requests.request(Purpose::Initialize, "initialize", &params))
    }

    fn set_model(&mut self, launch: &AgentLaunch) -> Option<Vec<Signal>> {
        self.models.want(launch);
        Some(Vec::new())
    }

    fn prompt(&mut self, request: &TurnRequest, images: &[Image]) -> String {
        self.cancelled = false;
        self.turn = TurnState::Starting;
        self.tools.clear();
        self.unknown.reset();
        let mut input = vec![json!({"type": "text", "text": request.text})];
        let local = |image: &Image| json!({"type": "localImage", "path": image.path});
        input.extend(images.iter().map(local));
        let mut params = json!({"threadId": self.thread, "input": input});
        for (field, value) in self.models.changes() {
            params[field] = value.into();
        }
        self.requests.request(Purpose::Prompt, "turn/start", &params)
    }

    fn cancel(&mut self) -> Option<String> {
        self.cancelled = true;
        let TurnState::Running(turn) = &self.turn else { return None };
        let turn = turn.clone();
        Some(self.interrupt(&turn))
    }

    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        self.questions.answer(request, answer)
    }

    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal> {
        self.interpret(line)
    }

    fn line_dropped(&mut self, head: &[u8]) -> Vec<Signal> {
        self.interpret_head(head)
    }

    fn close_questions(&mut self) -> Vec<Signal> {
        self.questions.close_all()
    }
}

impl Codex {
    fn interrupt(&mut self, turn: &str) -> String {
        let params = json!({"threadId": self.thread, "turnId": turn});
        self.requests.request(Purpose::Interrupt, "turn/interrupt", &params)
    }

    /// Codex is initialized: opens the conversation.
    fn initialized(&mut self, result: &Value) -> Vec<Signal> {
        // `harvest/0.166.0 (Debian 12…`: our own name, then its version.
        let agent = rpc::text(result, "userAgent");
        let version = agent.split(['/', ' ']).nth(1).unwrap_or_default();
        self.version = Some(version.to_owned()).filter(|version| !version.is_empty());
        let open = match self.saved.clone() {
            Some(thread) => {
                let mut params = self.thread_params();
                params["threadId"] = thread.into();
                self.requests.request(Purpose::Resume, "thread/resume", &params)
            }
            None => self.new_thread(),
        };
        let initialized = rpc::notification("initialized", &json!({}));
        let models = self.requests.request(Purpose::ModelList, "model/list", &json!({}));
        // The list is short and comes first: the first prompt may need it.
        vec![Signal::Send(initialized), Signal::Send(models), Signal::Send(open)]
    }

    fn new_thread(&mut self) -> String {
        let params = self.thread_params();
        self.requests.request(Purpose::New, "thread/start", &params)
    }

    fn thread_params(&self) -> Value {
        json!({
            "cwd": self.cwd,
            "approvalPolicy": "never",
            "sandbox": "danger-full-access",
            "developerInstructions": instructions(&self.cwd),
        })
    }

    fn ready_event(&self) -> Signal {
        Signal::Event(EventBody::AgentReady {
            version: self.version.clone(),
            model: self.models.current().map(str::to_owned),
            mcp: self.mcp.clone(),
        })
    }
}

fn argv(launch: &AgentLaunch) -> Vec<String> {
    let mut argv = vec!["codex".to_owned(), "app-server".to_owned()];
    let model =
        launch.model.as_ref().map(|model| ("model", Value::from(model.as_str()).to_string()));
    let config = CONFIG.iter().map(|(key, value)| (*key, (*value).to_owned()));
    // Otherwise the tool is offered but refuses.
    let questions = ("features.default_mode_request_user_input", launch.questions.to_string());
    let provider = ("model_providers.harvest", provider(&launch.upstream));
    for (key, value) in config.chain([provider, questions]).chain(model) {
        argv.extend(["-c".to_owned(), format!("{key}={value}")]);
    }
    argv
}

#[cfg(test)]
mod tests {
    use harvest_proto::{
        AgentName,
        bridge::*,
        door::{MCP_NAME, MODEL_NAME},
    };

    use super::*;

    #[test]
    fn model_requests_go_through_the_gateway() {
        let launch = AgentLaunch {
            name: AgentName::Codex,
            program: None,
            conversation: "c".into(),
            resume: false,
            model: Some("gpt \"5\"".into()),
            effort: None,
            upstream: "my-own".parse().unwrap(),
            protocol: ModelProtocol::Responses,
            questions: true,
            silence_millis: 1,
            restarts: RestartPolicy::default(),
        };
        let argv = argv(&launch).join(" ");
        assert!(argv.contains(&format!(r#"base_url = "http://{MODEL_NAME}/my-own/v1""#)), "{argv}");
        assert!(argv.contains(&format!(r#"url = "http://{MCP_NAME}/mcp""#)), "{argv}");
        assert!(argv.contains("-c features.default_mode_request_user_input=true "), "{argv}");
        assert!(argv.ends_with(r#"-c model="gpt \"5\"""#), "{argv}");
    }
}
