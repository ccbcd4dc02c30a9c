//! Agents that speak the Agent Client Protocol, version 1, over stdin and stdout: OpenCode, and any
//! program of the configuration. The requests sent to them; `map.rs` interprets their lines.
//! Nothing authenticates: the gateway holds the keys.
//!
//! ```text
//! initialize ─▶ session/resume, or session/load ──error──▶ session/new ─▶ ready ─▶ session/prompt…
//!            └─ without a saved conversation ────────────▶
//! ```

mod map;
mod opencode;

use std::collections::{BTreeMap, BTreeSet};

use harvest_proto::{
    Effort, EventBody,
    bridge::{AgentLaunch, AgentProgram, TurnRequest},
    door::MCP_NAME,
    event::{McpServer, McpState},
};
use serde_json::{Value, json};

pub(crate) use self::opencode::config as opencode_config;
use super::{
    Agent, AgentStart, Image, Invocation, Signal, images, rpc, rpc::OpenRequests,
    tool_calls::ToolCalls, unknown_lines::UnknownLines,
};
use crate::app::{self, RemoteServers};

/// The state of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Acp {
    requests: OpenRequests<Purpose>,
    cwd: String,
    /// The conversation to resume.
    saved: Option<String>,
    /// The conversation.
    session: String,
    version: Option<String>,
    /// The MCP servers over the network that it uses.
    remote_servers: RemoteServers,
    /// What a configured agent is given with `session/new`; the others find it in their files.
    configured: Option<Configured>,
    /// The model that OpenCode's conversation is to use: it remembers that of its last prompt.
    model: Option<String>,
    /// What is reported once the model is set.
    unreported: Vec<Signal>,
    /// The effort to set by an option; OpenCode has it in its configuration.
    effort: Option<Effort>,
    takes_images: bool,
    asks_for_tools: bool,
    /// The permission requests that wait for an answer: their id and options.
    asked: BTreeMap<String, (Value, Value)>,
    /// Whether the agent replays a conversation; none of it is new.
    replaying: bool,
    tools: ToolCalls,
    /// Whether open tool calls may never end: the prompt was cancelled, or a line was dropped.
    ends_missing: bool,
    /// The reply to the prompt, while tool calls are open.
    reply: Option<Result<(), String>>,
    unknown: UnknownLines,
}

/// What only the protocol tells an agent whose own files are unknown.
#[derive(Debug)]
struct Configured {
    env: BTreeMap<String, String>,
    /// The rules of the platform, until they are in front of the first prompt. An agent that is
    /// restarted gets them again: it may have crashed before it kept them.
    rules: Option<String>,
}

/// What a request was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Initialize,
    /// Continue the saved conversation.
    Resume,
    New,
    SetModel,
    SetEffort,
    Prompt,
    /// A message in the middle of a prompt, whose reply says nothing.
    Note,
}

impl Agent for Acp {
    fn invocation(&mut self, start: &AgentStart<'_>) -> Invocation {
        start.cwd.clone_into(&mut self.cwd);
        self.saved.clone_from(&start.conversation);
        match &start.launch.program {
            Some(AgentProgram { command, env }) => {
                self.configured = Some(Configured { env: start.env.clone(), rules: None });
                self.effort = start.launch.effort;
                let env = env.iter().map(|(name, value)| (name.clone(), value.clone()));
                Invocation { argv: command.clone(), env: env.collect(), warning: None }
            }
            None => {
                self.asks_for_tools = start.syncing;
                self.model = Some(opencode::model(start.launch));
                opencode::invocation(start)
            }
        }
    }

    fn init_line(&mut self) -> Option<String> {
        let files = json!({"readTextFile": false, "writeTextFile": false});
        let params = json!({
            "protocolVersion": 1,
            "clientCapabilities": {"fs": files, "terminal": false},
            "clientInfo": {"name": "harvest", "version": env!("CARGO_PKG_VERSION")},
        });
        Some(self.requests.request(Purpose::Initialize, "initialize", &params))
    }

    /// The model and the effort are set when the agent starts.
    fn set_model(&mut self, _launch: &AgentLaunch) -> Option<Vec<Signal>> {
        None
    }

    fn prompt(&mut self, request: &TurnRequest, images: &[Image]) -> String {
        self.ends_missing = false;
        self.reply = None;
        self.tools.clear();
        self.asked.clear();
        self.unknown.reset();
        let rules = self.configured.as_mut().and_then(|configured| configured.rules.take());
        let rules = rules.map(|text| json!({"type": "text", "text": text})).into_iter();
        let blocks = rules.chain(self.content(&request.text, images));
        let params = json!({"sessionId": self.session, "prompt": blocks.collect::<Vec<_>>()});
        self.requests.request(Purpose::Prompt, "session/prompt", &params)
    }

    fn cancel(&mut self) -> Option<String> {
        self.ends_missing = true;
        Some(rpc::notification("session/cancel", &json!({"sessionId": self.session})))
    }

    /// The protocol has no questions, so there is nothing to answer.
    fn answer(&mut self, _request: &str, _answer: &str) -> Vec<Signal> {
        Vec::new()
    }

    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal> {
        self.interpret(line)
    }

    fn line_dropped(&mut self, head: &[u8]) -> Vec<Signal> {
        self.ends_missing = true;
        self.interpret_head(head)
    }

    fn asks_for_tools(&self) -> bool {
        self.asks_for_tools
    }

    fn answer_tool(&mut self, request: &str, refusal: Option<&str>) -> Vec<Signal> {
        self.permit(request, refusal.is_none())
    }

    /// A further prompt is answered together with the one in progress.
    fn tell(&mut self, note: &str) -> Option<String> {
        let block = json!({"type": "text", "text": note});
        let params = json!({"sessionId": self.session, "prompt": [block]});
        let send = || self.requests.request(Purpose::Note, "session/prompt", &params);
        self.asks_for_tools.then(send)
    }

    fn close_questions(&mut self) -> Vec<Signal> {
        Vec::new()
    }
}

impl Acp {
    /// The agent is initialized: opens the conversation.
    fn initialized(&mut self, result: &Value) -> Vec<Signal> {
        let version = rpc::text(&result["agentInfo"], "version");
        self.version = Some(version.to_owned()).filter(|version| !version.is_empty());
        let capabilities = &result["agentCapabilities"];
        let resumes = capabilities["sessionCapabilities"]["resume"].is_object();
        let loads = capabilities["loadSession"].as_bool().unwrap_or(false);
        let mcp = &capabilities["mcpCapabilities"];
        self.remote_servers = RemoteServers { http: mcp["http"] == true, sse: mcp["sse"] == true };
        self.takes_images = capabilities["promptCapabilities"]["image"] == true;
        let method = match self.saved {
            Some(_) if resumes => "session/resume",
            Some(_) if loads => "session/load",
            _ => return vec![self.new_session()],
        };
        self.replaying = true;
        let params =
            json!({"sessionId": self.saved, "cwd": self.cwd, "mcpServers": self.mcp_servers()});
        vec![Signal::Send(self.requests.request(Purpose::Resume, method, &params))]
    }

    fn content(&self, text: &str, images: &[Image]) -> Vec<Value> {
        if !self.takes_images {
            return vec![json!({"type": "text", "text": images::named_in(text, images)})];
        }
        let image = |image: &Image| json!({"type": "image", "mimeType": image.media_type, "data": image.base64});
        let text = json!({"type": "text", "text": text});
        std::iter::once(text).chain(images.iter().map(image)).collect()
    }

    fn new_session(&mut self) -> Signal {
        let params = json!({"cwd": self.cwd, "mcpServers": self.mcp_servers()});
        Signal::Send(self.requests.request(Purpose::New, "session/new", &params))
    }

    /// Harvest's own tools, at their door; for a configured agent also those of the image and the
    /// repositories.
    fn mcp_servers(&self) -> Value {
        if let Some(Configured { env, .. }) = &self.configured {
            let variable = |name: &str| env.get(name).cloned();
            return app::acp_servers(&app::written_servers(), self.remote_servers, variable).into();
        }
        let url = format!("http://{MCP_NAME}/mcp");
        match self.remote_servers.http {
            true => json!([{"type": "http", "name": "harvest", "url": url, "headers": []}]),
            false => json!([]),
        }
    }

    /// The protocol does not say which of them the agent could start.
    fn offered_servers(&self) -> Vec<McpServer> {
        let told = self.mcp_servers();
        let told = told.as_array().map_or(&[][..], Vec::as_slice);
        let mut names: BTreeSet<String> =
            told.iter().map(|server| rpc::text(server, "name").to_owned()).collect();
        if self.configured.is_none() {
            // OpenCode reads the others from its file.
            names.extend(app::written_servers().into_iter().map(|(name, _)| name));
        }
        names.into_iter().map(|name| McpServer { name, state: McpState::Offered }).collect()
    }

    fn ready(&mut self, session: &str, result: &Value, is_new: bool) -> Vec<Signal> {
        self.replaying = false;
        session.clone_into(&mut self.session);
        if let Some(configured) = &mut self.configured {
            configured.rules = Some(app::instructions(&self.cwd));
        }
        let ready = EventBody::AgentReady {
            version: self.version.clone(),
            model: self.model.clone().or_else(|| map::model(result)),
            mcp: self.offered_servers(),
        };
        let mut signals = vec![Signal::Conversation(session.to_owned()), Signal::Event(ready)];
        signals.extend(self.effort.map(|effort| self.set_effort(effort, result)));
        signals.push(Signal::Ready { is_new });
        let current = map::model(result);
        match self.model.clone() {
            Some(model) if current.is_some_and(|current| current != model) => {
                self.unreported = signals;
                vec![self.set_option(Purpose::SetModel, "model", &model)]
            }
            _ => signals,
        }
    }

    fn set_option(&mut self, purpose: Purpose, option: &str, value: &str) -> Signal {
        let params = json!({"sessionId": self.session, "configId": option, "value": value});
        Signal::Send(self.requests.request(purpose, "session/set_config_option", &params))
    }

    fn set_effort(&mut self, effort: Effort, result: &Value) -> Signal {
        match map::effort_option(result, effort) {
            Some(option) => self.set_option(Purpose::SetEffort, &option, effort.as_str()),
            None => map::ignored("effort", "the agent offers no such option"),
        }
    }
}
