//! Agents: programs that carry out prompts. This is the vocabulary between them and [`crate::turn`];
//! how one agent is started and spoken to lives in its own folder.
//!
//! An agent is a program that speaks lines over its standard input and output. [`AgentProcess`] runs any
//! of them; what its lines mean is an [`Agent`]'s, which is pure: lines and orders in, lines and
//! [`Signal`]s out. One value of it serves one process.

mod claude;
mod noise;
mod process;
pub(crate) mod scripted;

use harvest_proto::{
    AgentName, EventBody,
    bridge::{AgentLaunch, PromptOrder},
};

pub(crate) use self::process::{AgentProcess, News};

/// How an agent is started and what its lines mean.
pub(crate) trait Agent {
    /// Its command line. `resume`: the disk should hold the conversation already; an agent for which that
    /// makes a difference exits when it is not so, and is started the other way.
    fn invocation(&self, launch: &AgentLaunch, cwd: &str, resume: bool) -> Invocation;

    /// What to say first, where it does not say by itself that it is [`Signal::Ready`].
    fn greeting(&self) -> Option<String>;

    /// The line that hands a prompt over. Its end is [`Signal::Done`].
    fn prompt(&mut self, order: &PromptOrder) -> String;

    /// The line that asks it to give the prompt up; it ends with [`Signal::Done`] as well. Who does not is
    /// killed.
    fn cancel(&self) -> String;

    /// A person's answer to a request of [`Signal::Asked`].
    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal>;

    /// What a line means. Any bytes may come: what has no meaning becomes a bounded number of events.
    fn hear(&mut self, line: &[u8]) -> Vec<Signal>;

    /// Forgets the requests nobody has answered, and names them.
    fn drop_requests(&mut self) -> Vec<String>;
}

/// The agent of this name.
pub(crate) fn named(name: &str) -> Result<Box<dyn Agent>, String> {
    Ok(match name.parse::<AgentName>().map_err(|unknown| unknown.to_string())? {
        AgentName::Claude => Box::new(claude::Claude::default()),
        AgentName::Scripted => Box::new(scripted::Scripted::default()),
    })
}

/// A command line, and what it gets on top of everybody's variables.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Invocation {
    pub(crate) argv: Vec<String>,
    pub(crate) env: &'static [(&'static str, &'static str)],
}

/// What an agent's line means to a turn.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Signal {
    /// It takes prompts.
    Ready,
    /// Something to tell.
    Event(EventBody),
    /// A line to send back at once.
    Say(String),
    /// A person has to answer this request.
    Asked { request: String },
    /// The prompt is done: well, or with this error.
    Done(Result<(), String>),
    /// Waiting longer is of no use, for this reason; the agent itself has not noticed yet.
    Hopeless(String),
}
