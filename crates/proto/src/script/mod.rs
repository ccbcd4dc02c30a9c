//! The language of scripts: what the scripted model (in the gateway) answers and what the scripted agent
//! (in the sandbox) does. Pure: does nothing, remembers nothing.
//!
//! A prompt carries its script on a line that begins with `script:`, followed by a JSON array that may
//! span lines; the first such line counts. Each element is a step: an object, or a list of objects. To
//! the model a step is one answer and the list its blocks, so a step that calls no tool ends the turn;
//! the agent plays everything to the end.
//!
//! | step | what the model or the agent does |
//! |---|---|
//! | `{"text": "…", "chunks": 4, "delay_ms": 0}` | says this, in so many pieces, waiting before each |
//! | `{"thinking": "…"}` | thinks aloud |
//! | `{"bash": "make test"}` | calls the shell tool |
//! | `{"write": {"path": "a", "content": "x"}}` | calls the tool that writes a file |
//! | `{"read": "a"}` | calls the tool that reads one |
//! | `{"edit": {"path": "a", "old": "x", "new": "y"}}` | calls the tool that edits one |
//! | `{"ask": {"question": "Which?", "options": ["a", "b"]}}` | asks the person |
//! | `{"tool": {"name": "Glob", "input": {}}}` | calls any tool by its name, offered or not |
//! | `{"error": {"status": 529, "type": "overloaded_error", "message": "…", "times": 2}}` | fails so often, then goes on with the rest of the answer |
//! | `{"hang": 30}` | stays silent for so many seconds |
//! | `{"drop": true}` | cuts the connection in mid-answer, once; a number says how often |
//! | `{"usage": {"input": 1, "output": 2, "cache_read": 3, "cache_write": 4}}` | counts these tokens, otherwise 100 and 20; the agent calls no model and counts none |
//! | `{"history": true}` | says how many earlier prompts it remembers |
//!
//! What befalls an agent itself only the scripted agent can play:
//!
//! | step | what the agent does |
//! |---|---|
//! | `{"crash": 3}` | ends with this code |
//! | `{"raw": "…"}` | writes this line where only its protocol belongs |
//! | `{"garbage": 1000}` | writes a line of so many bytes that are no text |
//! | `{"stderr": "…"}` | writes a line to its standard error |
//! | `{"flood": {"events": 1000, "bytes": 30000}}` | ends so many tool calls with an output of so many bytes each |
//!
//! Which step of the model is due follows from the request alone: as many as the agent has had answers since
//! the last text of the user. So retries, restarts, forks and resumes need no reset. After the last step the
//! model says `done`. What Claude wraps in `<system-reminder>` is not the user's text.

mod written;

use serde::Deserialize;
use serde_json::Value;

use self::written::Written;
use crate::event::Usage;

const MARKER: &str = "script:";
const DEFAULT_TEXT: &str =
    "This is the scripted model: it plays the script in a prompt, and this prompt has none.";

/// A script: the answers to the requests of one turn, in their order.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Value")]
pub struct Script(Vec<Vec<Block>>);

/// A script for prompts that carry none.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptRule {
    /// It is for prompts that contain this text.
    pub contains: String,
    /// What to play.
    pub steps: Script,
}

/// Why a text is not a script.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    /// What follows the marker is not JSON.
    #[error("the script is not a JSON array: {0}")]
    NotJson(String),
    /// A step means nothing.
    #[error("step {step} of the script, `{text}`: {problem}")]
    Step {
        /// Its number, from 1.
        step: usize,
        /// The step as written.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// One block of an answer, or something that befalls it. The tables above say what each does.
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
    /// A text in one piece.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into(), chunks: 1, delay_ms: 0 }
    }
}

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorStep {
    /// The HTTP status.
    #[serde(default = "ErrorStep::default_status")]
    pub status: u16,
    /// The kind, as the API names it.
    #[serde(rename = "type", default = "ErrorStep::default_kind")]
    pub kind: String,
    /// In words.
    #[serde(default = "ErrorStep::default_message")]
    pub message: String,
    /// How often it happens before it stops happening.
    #[serde(default = "ErrorStep::default_times")]
    pub times: u32,
}

impl ErrorStep {
    const fn default_status() -> u16 {
        500
    }
    fn default_kind() -> String {
        "api_error".to_owned()
    }
    fn default_message() -> String {
        "scripted error".to_owned()
    }
    const fn default_times() -> u32 {
        1
    }
}

impl Script {
    /// The script a prompt carries, if it carries one.
    ///
    /// # Errors
    /// When the prompt has a marker and what follows is no script.
    pub fn find(prompt: &str) -> Result<Option<Self>, ScriptError> {
        let mut start = 0;
        for line in prompt.split_inclusive('\n') {
            let indent = line.len() - line.trim_start().len();
            let rest = prompt[start + indent..].strip_prefix(MARKER).map(str::trim_start);
            // Without an array it is a word of the prompt, as in a CI configuration.
            if let Some(rest) = rest.filter(|rest| rest.starts_with('[')) {
                let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
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

    /// What to play for a prompt: its own script, the first rule's that fits, or a word about scripts.
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

    /// The blocks of the answer to the request with this number, from 0.
    #[must_use]
    pub fn answer(&self, number: usize) -> Vec<Block> {
        self.0.get(number).cloned().unwrap_or_else(|| vec![Block::text("done")])
    }

    /// Every block, in order: what an agent plays.
    pub fn into_blocks(self) -> impl Iterator<Item = Block> {
        self.0.into_iter().flatten()
    }
}

/// A text in at most so many pieces of about the same length, cut between characters.
#[must_use]
pub fn pieces(text: &str, pieces: usize) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    let length = characters.len().div_ceil(pieces.max(1)).max(1);
    characters.chunks(length).map(|piece| piece.iter().collect()).collect()
}

/// What `history` says.
#[must_use]
pub fn remembered(earlier: usize) -> String {
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
            let wrong = |problem: String| ScriptError::Step { step: number, text, problem };
            match serde_json::from_value::<Written>(block) {
                Ok(written) => written.block().map_err(|problem| wrong(problem.to_owned())),
                Err(error) => Err(wrong(error.to_string())),
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
    fn a_script_may_span_lines_and_stand_anywhere_in_the_prompt() {
        let prompt = "Please:\n  script: [{\"text\": \"a\"},\n [{\"bash\": \"ls\"}, {\"read\": \"x\"}]\n]\nthanks";
        let script = Script::find(prompt).unwrap().unwrap();
        assert_eq!(script.answer(0), [Block::Text { text: "a".into(), chunks: 4, delay_ms: 0 }]);
        assert_eq!(script.answer(1), [Block::Bash("ls".into()), Block::Read("x".into())]);
        assert_eq!(script.answer(2), [Block::text("done")]);
    }

    #[test]
    fn a_marker_in_the_middle_of_a_line_is_no_marker() {
        assert_eq!(Script::find("run the script: [1]"), Ok(None));
    }

    #[test]
    fn a_marker_without_an_array_is_a_word_of_the_prompt() {
        assert_eq!(Script::find("test:\n  script:\n    - make\nscript: {}\nscript:"), Ok(None));
    }

    #[test]
    fn an_unknown_step_is_named() {
        assert!(
            problem(r#"script: [{"text":"a"},{"bsh":"ls"}]"#)
                .starts_with("step 2 of the script, `{\"bsh\":\"ls\"}`: unknown field `bsh`")
        );
        assert!(problem(r#"script: [{"text":"a","bash":"b"}]"#).contains("two things at once"));
        assert!(problem("script: [{}]").contains("nothing to do"));
        assert!(problem("script: [").contains("not a JSON array"));
    }

    #[test]
    fn every_step_of_the_table_above_is_understood() {
        for row in include_str!("mod.rs").lines().filter_map(|line| line.strip_prefix("//! | `{")) {
            let step = format!("{{{}", row.split("` |").next().unwrap());
            assert!(Script::find(&format!("script: [{step}]")).unwrap().is_some(), "{step}");
        }
    }

    #[test]
    fn a_prompt_without_a_script_is_answered_by_the_first_rule_that_fits() {
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
        fn no_prompt_makes_it_panic(text in "\\PC{0,60}") {
            let _ = Script::find(&format!("script: {text}"));
            let _ = Script::find(&format!("{text}\nscript: [{text}]"));
        }
    }
}
