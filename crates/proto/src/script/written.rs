//! Steps as they are written, made into [`Block`]s. One field names the kind; serde names every field it
//! does not know.

use serde::Deserialize;
use serde_json::Value;

use super::{Block, ErrorStep};
use crate::event::Usage;

// The API sends no more pieces than this for a long answer; more would only be slow.
const MAX_CHUNKS: usize = 10_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    text: Option<String>,
    chunks: Option<usize>,
    delay_ms: Option<u64>,
    thinking: Option<String>,
    bash: Option<String>,
    write: Option<WrittenFile>,
    read: Option<String>,
    edit: Option<WrittenEdit>,
    ask: Option<WrittenQuestion>,
    tool: Option<WrittenTool>,
    error: Option<ErrorStep>,
    hang: Option<f64>,
    drop: Option<WrittenDrop>,
    usage: Option<WrittenUsage>,
    history: Option<bool>,
    crash: Option<u8>,
    raw: Option<String>,
    garbage: Option<usize>,
    stderr: Option<String>,
    flood: Option<WrittenFlood>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFile {
    path: String,
    content: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEdit {
    path: String,
    old: String,
    new: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenQuestion {
    question: String,
    options: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenTool {
    name: String,
    #[serde(default = "empty_object")]
    input: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenDrop {
    Once(bool),
    Times(u32),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenUsage {
    #[serde(default)]
    input: u64,
    #[serde(default)]
    output: u64,
    #[serde(default)]
    cache_read: u64,
    #[serde(default)]
    cache_write: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFlood {
    events: usize,
    bytes: usize,
}

fn empty_object() -> Value {
    Value::Object(serde_json::Map::new())
}

impl Written {
    pub(super) fn block(self) -> Result<Block, &'static str> {
        let chunks = self.chunks.unwrap_or(4).clamp(1, MAX_CHUNKS);
        let delay_ms = self.delay_ms.unwrap_or(0);
        if self.text.is_none() && (self.chunks.is_some() || self.delay_ms.is_some()) {
            return Err("`chunks` and `delay_ms` belong to `text`");
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
        let mut given = kinds.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some(block), None) => Ok(block),
            (None, _) => Err("it says nothing to do"),
            (Some(_), Some(_)) => Err("it says two things at once; put them in a list"),
        }
    }
}

impl WrittenDrop {
    fn times(&self) -> u32 {
        match self {
            Self::Once(once) => u32::from(*once),
            Self::Times(times) => *times,
        }
    }
}

impl From<WrittenUsage> for Usage {
    fn from(written: WrittenUsage) -> Self {
        Self {
            input_tokens: written.input,
            output_tokens: written.output,
            cache_read_tokens: written.cache_read,
            cache_write_tokens: written.cache_write,
        }
    }
}
