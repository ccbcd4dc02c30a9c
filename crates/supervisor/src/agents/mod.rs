//! Agents: programs that execute prompts. This module is the interface between them and
//! [`crate::turn`]; each agent has its own folder.
//!
//! An agent exchanges lines over stdin and stdout. [`AgentProcess`] runs any of them; an [`Agent`]
//! interprets the lines. It is pure: lines and requests in, lines and [`Signal`]s out. One value
//! serves one process.

mod claude;
mod plan;
mod process;
pub(crate) mod scripted;
mod unknown_lines;

use harvest_proto::{
    AgentName, EventBody,
    bridge::{AgentLaunch, TurnRequest},
};

pub(crate) use self::process::{AgentContext, AgentOutput, AgentProcess};

pub(crate) trait Agent {
    /// The command line. With `resume` the conversation should exist on disk; if it does not, the
    /// agent exits and is started again without it.
    fn invocation(&self, launch: &AgentLaunch, cwd: &str, resume: bool) -> Invocation;

    /// The first line to send, for agents that do not report [`Signal::Ready`] by themselves.
    fn init_line(&self) -> Option<String>;

    /// The line that starts a prompt, which ends with [`Signal::Done`].
    fn prompt(&mut self, request: &TurnRequest) -> String;

    /// The line that cancels the prompt, which then ends with [`Signal::Done`], or the agent is
    /// killed.
    fn cancel(&self) -> String;

    /// Handles the user's answer to a [`Signal::Question`].
    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal>;

    /// Interprets a line of arbitrary bytes. Unknown lines become a bounded number of events.
    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal>;

    /// Removes and returns the unanswered questions.
    fn take_open_requests(&mut self) -> Vec<String>;
}

/// The agent of this name.
pub(crate) fn named(name: AgentName) -> Box<dyn Agent> {
    match name {
        AgentName::Claude => Box::new(claude::Claude::default()),
        AgentName::Scripted => Box::new(scripted::Scripted::default()),
    }
}

/// A command line and additional environment variables.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Invocation {
    pub(crate) argv: Vec<String>,
    pub(crate) env: &'static [(&'static str, &'static str)],
}

/// The meaning of an agent's line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Signal {
    /// The agent accepts prompts.
    Ready,
    Event(EventBody),
    /// A line to send back at once.
    Send(String),
    /// The user has to answer this request.
    Question {
        request: String,
    },
    /// The prompt has ended, possibly with an error.
    Done(Result<(), String>),
    /// The prompt cannot succeed for this reason, though the agent keeps retrying.
    Unrecoverable(String),
}
