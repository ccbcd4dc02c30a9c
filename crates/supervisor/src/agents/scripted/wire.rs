//! The lines between the supervisor and the scripted agent: one JSON object each.

use harvest_proto::PromptId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What the supervisor says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum ToProgram {
    /// Carry this out.
    Prompt { prompt: PromptId, text: String },
    /// A person's answer.
    Answer { request: String, answer: String },
    /// Give up what you are doing.
    Cancel,
}

/// What the agent says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum FromProgram {
    /// It takes prompts, and remembers so many.
    Ready { remembers: usize },
    /// A piece of its answer.
    Text { text: String },
    /// A piece of its thoughts.
    Thought { text: String },
    /// It calls a tool.
    Tool { call: String, name: String, input: Value },
    /// The tool answered.
    Result { call: String, ok: bool, output: String },
    /// A person has to answer.
    Ask { request: String, question: String, options: Vec<String> },
    /// The model it pretends to ask makes it wait.
    Retry { attempt: u32, status: Option<u16> },
    /// The prompt is done: well, or with this error.
    Done { error: Option<String> },
}

impl ToProgram {
    /// As a line, without its end.
    pub(super) fn line(&self) -> String {
        serde_json::to_string(self).expect("these messages hold only text")
    }
}
