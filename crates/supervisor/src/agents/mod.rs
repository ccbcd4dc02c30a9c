//! Agents: programs that execute prompts. This module is the interface between them and
//! [`crate::turn`]; each agent has its own folder.
//!
//! An agent exchanges lines over stdin and stdout. [`AgentProcess`] runs any of them; an [`Agent`]
//! interprets the lines. It is pure: lines and requests in, lines and [`Signal`]s out. One value
//! serves one process.

mod acp;
mod claude;
mod codex;
mod conversation;
mod dropped_line;
mod images;
mod last_warning;
mod lines;
mod plan;
mod process;
mod rpc;
pub(crate) mod scripted;
mod stdin;
mod tool_calls;
mod tool_gate;
mod unknown_lines;

use std::collections::BTreeMap;

use harvest_proto::{
    AgentName, EventBody,
    bridge::{AgentLaunch, TurnRequest},
};

pub(crate) use self::acp::opencode_config;
pub(crate) use self::images::Image;
pub(crate) use self::process::{AgentContext, AgentOutput, AgentProcess, AgentStartError};
pub(crate) use self::tool_gate::ToolRequest;

pub(crate) trait Agent {
    /// The command line. With `resume` the conversation should exist on disk; if it does not, the
    /// agent exits and is started again without it, or begins a new one by itself.
    fn invocation(&mut self, start: &AgentStart<'_>) -> Invocation;

    /// The first line to send, for agents that do not report [`Signal::Ready`] by themselves.
    fn init_line(&mut self) -> Option<String>;

    /// Makes the running agent use another model or effort of the same model service. `None` if it
    /// has to be started again for that.
    fn set_model(&mut self, launch: &AgentLaunch) -> Option<Vec<Signal>>;

    /// The line that starts a prompt, which ends with [`Signal::Done`].
    fn prompt(&mut self, request: &TurnRequest, images: &[Image]) -> String;

    /// The line that cancels the prompt, which then ends with [`Signal::Done`], or the agent is
    /// killed. `None` if there is nothing to cancel yet; the agent is told as soon as it can be.
    fn cancel(&mut self) -> Option<String>;

    /// Handles the user's answer to a [`Signal::Question`].
    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal>;

    /// Interprets a line of arbitrary bytes. Unknown lines become a bounded number of events.
    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal>;

    /// Handles a line that is too long to be read and begins with `head`: what waits for it must
    /// not wait forever.
    fn line_dropped(&mut self, _head: &[u8]) -> Vec<Signal> {
        Vec::new()
    }

    /// Whether this process asks before it runs a tool ([`Signal::AsksForTool`]), so that a prompt
    /// can begin during a sync.
    fn asks_for_tools(&self) -> bool {
        false
    }

    /// Answers a [`Signal::AsksForTool`].
    fn answer_tool(&mut self, _request: &str, _refusal: Option<&str>) -> Vec<Signal> {
        Vec::new()
    }

    /// The line that tells the model something in the middle of a prompt, for agents whose refusals
    /// cannot say why.
    fn tell(&mut self, _note: &str) -> Option<String> {
        None
    }

    /// Closes the unanswered questions: the agent is told that no answer comes.
    fn close_questions(&mut self) -> Vec<Signal>;
}

/// The agent of this name.
pub(crate) fn named(name: &AgentName) -> Box<dyn Agent> {
    match name {
        AgentName::Claude => Box::new(claude::Claude::default()),
        AgentName::Opencode | AgentName::Configured(_) => Box::new(acp::Acp::default()),
        AgentName::Codex => Box::new(codex::Codex::default()),
        AgentName::Scripted => Box::new(scripted::Scripted::default()),
    }
}

/// What an agent is started for.
#[derive(Debug)]
pub(crate) struct AgentStart<'a> {
    pub(crate) launch: &'a AgentLaunch,
    /// The working directory.
    pub(crate) cwd: &'a str,
    pub(crate) resume: bool,
    /// Whether the checkouts are being synced.
    pub(crate) syncing: bool,
    /// The last [`Signal::Conversation`] on this disk, if it is to be resumed.
    pub(crate) conversation: Option<String>,
    /// The environment of the agent.
    pub(crate) env: &'a BTreeMap<String, String>,
}

/// A command line and additional environment variables.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Invocation {
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// What the user should know about this start.
    pub(crate) warning: Option<String>,
}

/// The meaning of an agent's line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Signal {
    /// The agent accepts prompts.
    Ready {
        /// Whether it begins a conversation, and so remembers nothing.
        is_new: bool,
    },
    /// The agent has chosen this id for its conversation.
    Conversation(String),
    Event(EventBody),
    /// A line to send back at once.
    Send(String),
    /// The user has to answer this request.
    Question {
        request: String,
    },
    /// The agent asks whether it may run a tool.
    AsksForTool(ToolRequest),
    /// The agent has withdrawn that question.
    ToolWithdrawn {
        request: String,
    },
    /// The prompt has ended, possibly with an error.
    Done(Result<(), String>),
    /// The agent has executed this prompt before; it does not run again.
    Repeated,
    /// The line is about work of an earlier turn, which says nothing about the one in progress.
    EarlierTurn,
    /// The prompt cannot succeed for this reason, though the agent keeps retrying.
    Unrecoverable(String),
}

impl Signal {
    /// Whether the agent says or does something: the rest is about itself.
    pub(crate) fn is_output(&self) -> bool {
        use EventBody::{
            Compacted, Plan, TextDelta, ThoughtDelta, ToolEnded, ToolOutput, ToolStarted,
        };
        let Self::Event(body) = self else { return false };
        matches!(
            body,
            TextDelta { .. }
                | ThoughtDelta { .. }
                | ToolStarted { .. }
                | ToolOutput { .. }
                | ToolEnded { .. }
                | Plan { .. }
                | Compacted {}
        )
    }
}

/// Why a turn failed whose agent finished without any output.
pub(crate) const SILENT_TURN: &str = "the agent ended its turn without any output";

/// What an agent is told about a request that is too long to be read.
const TOO_LONG: &str = "the message is too long";

// Of one agent; usually it waits for the answer to one.
const MAX_OPEN_QUESTIONS: usize = 16;

// A question is shown to the user: a few hundred characters.
const MAX_QUESTION_BYTES: usize = 64 * 1024;

/// Whether an agent may ask this question, too. The limits keep a hostile agent from growing the
/// supervisor.
fn may_ask(open: usize, question: &serde_json::Value) -> bool {
    open < MAX_OPEN_QUESTIONS && question.to_string().len() <= MAX_QUESTION_BYTES
}

/// What an agent is told about a question that stays without an answer.
const NO_ANSWER: &str = "No user can answer this question now. Go on without an answer.";

/// The signals of a question that is closed without an answer. `refusal` is the agent's line.
fn closed_unanswered(request: String, refusal: String) -> [Signal; 2] {
    let closed = EventBody::RequestClosed { request, answer: None };
    [Signal::Event(closed), Signal::Send(refusal)]
}

/// Why no attempt of a model call can succeed. `key` is the name of the secret.
fn key_rejected(key: &str) -> String {
    format!(
        "the model service rejected the API key (401); store a valid one with `harvest secret set \
         {key}`"
    )
}

fn owned(env: &[(&str, &str)]) -> Vec<(String, String)> {
    env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}
