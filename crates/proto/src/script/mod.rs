//! Scripts in prompts: the responses of the scripted model (in the gateway) and the actions of the
//! scripted agent (in the sandbox). Pure: parses scripts, runs nothing.
//!
//! A script is a JSON array after a line's prefix `script:`; it may span lines, and the first one
//! in a prompt counts. Each element is a step: an object, or a list of objects. For the model a
//! step is one response and the list its content blocks, so a step without a tool call ends the
//! turn. The agent runs all steps. One script is for all agents: a step becomes a call of the tool
//! that the agent has for it, by whatever name; without one for files, of its shell.
//!
//! | step | what the model or the agent does |
//! |---|---|
//! | `{"text": "…", "chunks": 4, "delay_ms": 0}` | writes this text in that many chunks, with a delay before each |
//! | `{"thinking": "…"}` | writes a thought |
//! | `{"bash": "make test"}` | calls the shell tool |
//! | `{"write": {"path": "a", "content": "x"}}` | calls the tool that writes a file |
//! | `{"read": "a"}` | calls the tool that reads a file |
//! | `{"edit": {"path": "a", "old": "x", "new": "y"}}` | calls the tool that edits a file; for agents that patch, whole lines |
//! | `{"ask": {"question": "Which?", "options": ["a", "b"]}}` | asks the user |
//! | `{"tool": {"name": "Glob", "input": {}}}` | calls a tool by name, whether or not it was offered; `mcp__SERVER__TOOL` is found by every agent's name of it |
//! | `{"error": {"status": 529, "type": "overloaded_error", "message": "…", "times": 2}}` | fails that many times, then continues with the rest of the response |
//! | `{"hang": 30}` | is silent for that many seconds |
//! | `{"drop": true}` | closes the connection in mid-response, once or the given number of times |
//! | `{"usage": {"input": 1, "output": 2, "cache_read": 3, "cache_write": 4}}` | reports these tokens instead of 100 and 20; the agent calls no model and reports none |
//! | `{"history": true}` | writes how many earlier prompts the conversation has |
//!
//! Only the scripted agent supports these steps, which are failures of the agent process itself:
//!
//! | step | what the agent does |
//! |---|---|
//! | `{"crash": 3}` | exits with this code |
//! | `{"raw": "…"}` | writes this line to stdout, where only its protocol is allowed |
//! | `{"garbage": 1000}` | writes a line of that many bytes that are not UTF-8 |
//! | `{"stderr": "…"}` | writes a line to stderr |
//! | `{"flood": {"events": 1000, "bytes": 30000}}` | ends that many tool calls, each with that many bytes of output |
//!
//! The scripted model has no state: the number of responses since the last user text selects the
//! step. So retries, restarts, forks and resumes need no reset. After the last step the model
//! writes `done`. Text that Claude wraps in `<system-reminder>` is not user text.

mod parse;

use serde::Deserialize;
use serde_json::Value;

use self::parse::StepJson;
use crate::{event::Usage, json::PlainJson};

const MARKER: &str = "script:";
const DEFAULT_TEXT: &str = "This is the scripted model. It plays the script in a prompt; this prompt \
                            has none.";

/// A script: the responses to the requests of one turn, in order.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Value")]
pub struct Script(Vec<Vec<Block>>);

/// A script for prompts that contain a given text and no script.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptRule {
    /// Text the prompt must contain.
    pub contains: String,
    /// The script for such a prompt.
    pub steps: Script,
}

/// Why a text is not a script.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    /// The text after the prefix is not a JSON array.
    #[error("the script is not a JSON array: {0}")]
    NotJson(String),
    /// A step is invalid.
    #[error("step {step} of the script, `{text}`: {problem}")]
    Step {
        /// Number of the step, from 1.
        step: usize,
        /// The step as written.
        text: String,
        /// The problem.
        problem: String,
    },
}

/// A content block of a response, or a failure. The tables above describe each.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the tables of this file are where each is explained")]
pub enum Block {
    Text { text: String, chunks: usize, delay_ms: u64 },
    Thinking(String),
    Bash(String),
    Write { path: String, content: String },
    Read(String),
    Edit { path: String, old: String, new: String },
    Ask { question: String, options: Vec<String> },
    Tool { name: String, input: Value },
    Error(ErrorStep),
    Hang { seconds: f64 },
    Drop { times: u32 },
    Usage(Usage),
    History,
    Crash(u8),
    Raw(String),
    Garbage(usize),
    Stderr(String),
    Flood { events: usize, bytes: usize },
}

impl Block {
    /// A text in one chunk.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into(), chunks: 1, delay_ms: 0 }
    }
}

/// An error response.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ErrorStep {
    /// The HTTP status.
    pub status: u16,
    /// Error type of the model API.
    #[serde(rename = "type")]
    pub kind: String,
    /// Error message.
    pub message: String,
    /// Number of requests that fail before one succeeds.
    pub times: u32,
}

impl Default for ErrorStep {
    fn default() -> Self {
        let (kind, message) = ("api_error".to_owned(), "scripted error".to_owned());
        Self { status: 500, kind, message, times: 1 }
    }
}

impl Script {
    /// Finds the script in a prompt, if any.
    ///
    /// # Errors
    /// When the prompt has a script that is invalid.
    pub fn find(prompt: &str) -> Result<Option<Self>, ScriptError> {
        let mut start = 0;
        for line in prompt.split_inclusive('\n') {
            let indent = line.len() - line.trim_start().len();
            let rest = prompt[start + indent..].strip_prefix(MARKER).map(str::trim_start);
            // Without an array `script:` is ordinary text, for example a key of a CI configuration.
            if let Some(rest) = rest.filter(|rest| rest.starts_with('[')) {
                let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
                let mut plain = serde_json::Deserializer::from_str(rest).into_iter::<PlainJson>();
                if let Some(Err(error)) = plain.next() {
                    return Err(ScriptError::NotJson(error.to_string()));
                }
                return match values.next() {
                    Some(Ok(value)) => Self::try_from(value).map(Some),
                    Some(Err(error)) => Err(ScriptError::NotJson(error.to_string())),
                    None => Ok(None),
                };
            }
            start += line.len();
        }
        Ok(None)
    }

    /// Chooses the script for a prompt: its own, else that of the first matching rule, else a text
    /// that explains scripts.
    ///
    /// # Errors
    /// As [`Script::find`].
    pub fn choose(prompt: &str, rules: &[ScriptRule]) -> Result<Self, ScriptError> {
        if let Some(own) = Self::find(prompt)? {
            return Ok(own);
        }
        let rule = rules.iter().find(|rule| prompt.contains(&rule.contains));
        Ok(rule
            .map_or_else(|| Self(vec![vec![Block::text(DEFAULT_TEXT)]]), |rule| rule.steps.clone()))
    }

    /// The blocks of the response to a request; requests are numbered from 0.
    #[must_use]
    pub fn answer(&self, number: usize) -> Vec<Block> {
        self.0.get(number).cloned().unwrap_or_else(|| vec![Block::text("done")])
    }

    /// All blocks in order, as the scripted agent runs them.
    pub fn into_blocks(self) -> impl Iterator<Item = Block> {
        self.0.into_iter().flatten()
    }
}

/// Splits a text into at most `pieces` parts of about the same length.
#[must_use]
pub fn split_text(text: &str, pieces: usize) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    let length = characters.len().div_ceil(pieces.max(1)).max(1);
    characters.chunks(length).map(|piece| piece.iter().collect()).collect()
}

/// The text of a `history` step.
#[must_use]
pub fn history_text(earlier: usize) -> String {
    format!("I remember {earlier} earlier prompts.")
}

impl TryFrom<Value> for Script {
    type Error = ScriptError;

    fn try_from(value: Value) -> Result<Self, ScriptError> {
        let Value::Array(steps) = value else {
            return Err(ScriptError::NotJson("expected `[`".to_owned()));
        };
        steps
            .into_iter()
            .enumerate()
            .map(|(index, step)| blocks(index + 1, step))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

fn blocks(number: usize, step: Value) -> Result<Vec<Block>, ScriptError> {
    let blocks = match step {
        Value::Array(blocks) => blocks,
        one => vec![one],
    };
    blocks
        .into_iter()
        .map(|block| {
            let text: String = block.to_string().chars().take(200).collect();
            let invalid = |problem: String| ScriptError::Step { step: number, text, problem };
            match serde_json::from_value::<StepJson>(block) {
                Ok(step) => step.block().map_err(|problem| invalid(problem.to_owned())),
                Err(error) => Err(invalid(error.to_string())),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problem(prompt: &str) -> String {
        Script::find(prompt).unwrap_err().to_string()
    }

    #[test]
    fn json_in_private_keys_is_not_parsed() {
        let hidden = r#"script: [{"$serde_json::private::RawValue":"{\"text\":\"a\"}"}] and text"#;
        assert!(matches!(Script::find(hidden), Err(ScriptError::NotJson(_))));
    }

    #[test]
    fn script_spans_lines_anywhere_in_prompt() {
        let prompt = "Please:\n  script: [{\"text\": \"a\"},\n [{\"bash\": \"ls\"}, {\"read\": \"x\"}]\n]\nthanks";
        let script = Script::find(prompt).unwrap().unwrap();
        assert_eq!(script.answer(0), [Block::Text { text: "a".into(), chunks: 4, delay_ms: 0 }]);
        assert_eq!(script.answer(1), [Block::Bash("ls".into()), Block::Read("x".into())]);
        assert_eq!(script.answer(2), [Block::text("done")]);
    }

    #[test]
    fn prefix_inside_a_line_is_ignored() {
        assert_eq!(Script::find("run the script: [1]"), Ok(None));
    }

    #[test]
    fn prefix_without_array_is_ignored() {
        assert_eq!(Script::find("test:\n  script:\n    - make\nscript: {}\nscript:"), Ok(None));
    }

    #[test]
    fn invalid_step_is_named_in_error() {
        assert!(
            problem(r#"script: [{"text":"a"},{"bsh":"ls"}]"#)
                .starts_with("step 2 of the script, `{\"bsh\":\"ls\"}`: unknown field `bsh`")
        );
        assert!(problem(r#"script: [{"text":"a","bash":"b"}]"#).contains("two actions"));
        assert!(problem("script: [{}]").contains("no action"));
        assert!(problem("script: [").contains("not a JSON array"));
    }

    #[test]
    fn documented_steps_parse() {
        for row in include_str!("mod.rs").lines().filter_map(|line| line.strip_prefix("//! | `{")) {
            let step = format!("{{{}", row.split("` |").next().unwrap());
            assert!(Script::find(&format!("script: [{step}]")).unwrap().is_some(), "{step}");
        }
    }

    #[test]
    fn first_matching_rule_answers_prompt_without_script() {
        let rules = serde_json::from_str::<Vec<ScriptRule>>(
            r#"[{"contains":"deploy","steps":[{"text":"no"}]},{"contains":"","steps":[{"text":"any"}]}]"#,
        )
        .unwrap();
        assert_eq!(Script::choose("please deploy", &rules).unwrap(), rules[0].steps);
        assert_eq!(Script::choose("x", &rules).unwrap(), rules[1].steps);
        assert_eq!(Script::choose("x", &[]).unwrap().answer(0), [Block::text(DEFAULT_TEXT)]);
    }

    proptest! {
        #[test]
        fn any_prompt_parses_without_panic(text in "\\PC{0,60}") {
            let _ = Script::find(&format!("script: {text}"));
            let _ = Script::find(&format!("{text}\nscript: [{text}]"));
        }
    }
}
