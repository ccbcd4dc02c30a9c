//! Parses a step's JSON into a [`Block`]. Exactly one field selects the action; serde names unknown
//! fields.

use serde::Deserialize;
use serde_json::Value;

use super::{Block, ErrorStep};
use crate::event::Usage;

// The real API sends fewer chunks even for a long response.
const MAX_CHUNKS: usize = 10_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepJson {
    text: Option<String>,
    chunks: Option<usize>,
    delay_ms: Option<u64>,
    thinking: Option<String>,
    bash: Option<String>,
    write: Option<WriteJson>,
    read: Option<String>,
    edit: Option<EditJson>,
    ask: Option<QuestionJson>,
    tool: Option<ToolJson>,
    error: Option<ErrorStep>,
    hang: Option<f64>,
    drop: Option<DropJson>,
    usage: Option<UsageJson>,
    history: Option<bool>,
    crash: Option<u8>,
    raw: Option<String>,
    garbage: Option<usize>,
    stderr: Option<String>,
    flood: Option<FloodJson>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteJson {
    path: String,
    content: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EditJson {
    path: String,
    old: String,
    new: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QuestionJson {
    question: String,
    options: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolJson {
    name: String,
    #[serde(default = "empty_object")]
    input: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DropJson {
    Once(bool),
    Times(u32),
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct UsageJson {
    input: u64,
    output: u64,
    cache_read: u64,
    cache_write: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FloodJson {
    events: usize,
    bytes: usize,
}

fn empty_object() -> Value {
    Value::Object(serde_json::Map::new())
}

impl StepJson {
    pub(super) fn block(self) -> Result<Block, &'static str> {
        let chunks = self.chunks.unwrap_or(4).clamp(1, MAX_CHUNKS);
        let delay_ms = self.delay_ms.unwrap_or(0);
        if self.text.is_none() && (self.chunks.is_some() || self.delay_ms.is_some()) {
            return Err("`chunks` and `delay_ms` are only for `text`");
        }
        let kinds = [
            self.text.map(|text| Block::Text { text, chunks, delay_ms }),
            self.thinking.map(Block::Thinking),
            self.bash.map(Block::Bash),
            self.write.map(|file| Block::Write { path: file.path, content: file.content }),
            self.read.map(Block::Read),
            self.edit.map(|edit| Block::Edit { path: edit.path, old: edit.old, new: edit.new }),
            self.ask.map(|ask| Block::Ask { question: ask.question, options: ask.options }),
            self.tool.map(|tool| Block::Tool { name: tool.name, input: tool.input }),
            self.error.map(Block::Error),
            self.hang.map(|seconds| Block::Hang { seconds: seconds.clamp(0.0, 86_400.0) }),
            self.drop.map(|drop| Block::Drop { times: drop.times() }),
            self.usage.map(|usage| Block::Usage(usage.into())),
            self.history.map(|_| Block::History),
            self.crash.map(Block::Crash),
            self.raw.map(Block::Raw),
            self.garbage.map(Block::Garbage),
            self.stderr.map(Block::Stderr),
            self.flood.map(|flood| Block::Flood { events: flood.events, bytes: flood.bytes }),
        ];
        let mut actions = kinds.into_iter().flatten();
        match (actions.next(), actions.next()) {
            (Some(block), None) => Ok(block),
            (None, _) => Err("the step has no action"),
            (Some(_), Some(_)) => Err("the step has two actions; put them in a list"),
        }
    }
}

impl DropJson {
    fn times(&self) -> u32 {
        match self {
            Self::Once(once) => u32::from(*once),
            Self::Times(times) => *times,
        }
    }
}

impl From<UsageJson> for Usage {
    fn from(usage: UsageJson) -> Self {
        Self {
            input_tokens: usage.input,
            output_tokens: usage.output,
            cache_read_tokens: usage.cache_read,
            cache_write_tokens: usage.cache_write,
        }
    }
}
