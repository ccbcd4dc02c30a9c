//! Agents: programs that carry out prompts. This is the vocabulary between them and
//! [`crate::turn`]; how one agent is started and spoken to lives in its own folder.
//!
//! There is one agent so far, so there is no trait: the second one shapes it.

pub(crate) mod claude;
mod process;

use harvest_proto::EventBody;

pub(crate) use self::process::{AgentProcess, News, StartError};

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
