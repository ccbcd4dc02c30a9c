//! The line protocol between the supervisor and the scripted agent: one JSON object per line.

use harvest_proto::PromptId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum ToProgram {
    /// With `ask`, each tool waits for a `Tool` line.
    Prompt {
        prompt: PromptId,
        text: String,
        ask: bool,
    },
    Answer {
        request: String,
        answer: String,
    },
    /// The tool may run, unless it is refused.
    Tool {
        call: String,
        refusal: Option<String>,
    },
    Cancel,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum FromProgram {
    /// The agent accepts prompts and remembers this many.
    Ready { remembers: usize },
    /// A text delta.
    Text { text: String },
    /// A thought delta.
    Thought { text: String },
    /// A tool call starts.
    Tool { call: String, name: String, input: Value },
    /// A tool call ends.
    Result { call: String, ok: bool, output: String },
    /// A question for the user.
    Ask { request: String, question: String, options: Vec<String> },
    /// A simulated retry of a model request.
    Retry { attempt: u32, status: Option<u16> },
    /// The prompt ended, possibly with an error.
    Done { error: Option<String> },
}

impl ToProgram {
    /// The line without the newline.
    pub(super) fn line(&self) -> String {
        serde_json::to_string(self).expect("the message has only string keys")
    }
}
