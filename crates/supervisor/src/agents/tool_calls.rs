//! The open tool calls of a turn, for agents that report a call in several lines: each call starts
//! once and ends once, and its output is reported while it runs.

use std::collections::BTreeMap;

use harvest_proto::{EventBody, event::ToolKind};
use serde_json::Value;

use super::Signal;
use crate::truncate;

// Of one call, while it runs. `ToolEnded` has all of the output.
const MAX_LIVE_BYTES: usize = 64 * 1024;

// An agent and its sub-agents run a few calls at once. The limits keep a hostile agent from growing
// the supervisor.
const MAX_OPEN_CALLS: usize = 64;
const MAX_INPUT_BYTES: usize = 256 * 1024;

/// A tool call that has not ended.
#[derive(Debug, Default)]
pub(super) struct ToolCall {
    name: String,
    pub(super) kind: ToolKind,
    /// As JSON, which takes less memory than the value. Empty for null.
    input: String,
    started: bool,
    /// The output reported so far.
    live: String,
}

impl ToolCall {
    /// The first name is the name of the tool; later ones describe the call.
    pub(super) fn set_name(&mut self, name: &str) {
        if self.name.is_empty() {
            self.name = truncate::text(name, truncate::MAX_NAME_BYTES);
        }
    }

    pub(super) fn set_input(&mut self, input: &Value) {
        self.input = input.to_string();
        if self.input.len() > MAX_INPUT_BYTES {
            self.input = truncate::value(input.clone()).to_string();
        }
    }

    pub(super) fn input(&self) -> Value {
        serde_json::from_str(&self.input).unwrap_or_default()
    }
}

#[derive(Debug, Default)]
pub(super) struct ToolCalls(BTreeMap<String, ToolCall>);

impl ToolCalls {
    /// The call of this id, which is new if it was not open. Of too many, one is forgotten.
    pub(super) fn open(&mut self, call: &str) -> &mut ToolCall {
        let id = id(call);
        if self.0.len() >= MAX_OPEN_CALLS && !self.0.contains_key(&id) {
            self.0.pop_first();
        }
        self.0.entry(id).or_default()
    }

    pub(super) fn is_open(&self, call: &str) -> bool {
        self.0.contains_key(&id(call))
    }

    /// Whether a call runs. One that was only announced may never start.
    pub(super) fn any_started(&self) -> bool {
        self.0.values().any(|tool| tool.started)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Reports the start of a call, once.
    pub(super) fn start(&mut self, call: &str) -> Vec<Signal> {
        let tool = self.open(call);
        if std::mem::replace(&mut tool.started, true) {
            return Vec::new();
        }
        let started = EventBody::ToolStarted {
            call: id(call),
            name: tool.name.clone(),
            kind: tool.kind,
            input: tool.input(),
            parent: None,
            blob: None,
        };
        vec![Signal::Event(started)]
    }

    /// Reports what a running call has written.
    pub(super) fn output(&mut self, call: &str, delta: &str) -> Vec<Signal> {
        let tool = self.open(call);
        let space = MAX_LIVE_BYTES.saturating_sub(tool.live.len());
        let text = delta[..delta.floor_char_boundary(space)].to_owned();
        if text.is_empty() {
            return Vec::new();
        }
        tool.live.push_str(&text);
        vec![Signal::Event(EventBody::ToolOutput { call: id(call), text })]
    }

    /// Like `output`, for an agent that repeats everything the call has written.
    pub(super) fn output_so_far(&mut self, call: &str, output: &str) -> Vec<Signal> {
        let tool = self.open(call);
        // An agent that drops the beginning of a long output reports nothing new this way.
        let delta = output.strip_prefix(tool.live.as_str()).unwrap_or_default().to_owned();
        self.output(call, &delta)
    }

    /// Reports the end of a call, and its start if that is missing.
    pub(super) fn end(&mut self, call: &str, ok: bool, output: String) -> Vec<Signal> {
        let mut signals = self.start(call);
        self.0.remove(&id(call));
        let ended = EventBody::ToolEnded { call: id(call), ok, output, blob: None };
        signals.push(Signal::Event(ended));
        signals
    }

    /// Reports the end of the calls that still run when the turn has ended.
    pub(super) fn end_all(&mut self, ok: bool) -> Vec<Signal> {
        let note =
            if ok { "(still running at the end of the turn)" } else { "(ended with the turn)" };
        let end = |(call, mut tool): (String, ToolCall)| {
            tool.live.push_str(note);
            let output = tool.live;
            Signal::Event(EventBody::ToolEnded { call, ok, output, blob: None })
        };
        std::mem::take(&mut self.0).into_iter().filter(|(_, tool)| tool.started).map(end).collect()
    }
}

/// The id of a call as it is kept and reported.
fn id(call: &str) -> String {
    truncate::text(call, truncate::MAX_NAME_BYTES)
}

/// The output of a command, with its exit code unless that is 0.
pub(super) fn with_exit_code(mut output: String, code: Option<i64>) -> String {
    if let Some(code) = code.filter(|code| *code != 0) {
        let separator = if output.is_empty() || output.ends_with('\n') { "" } else { "\n" };
        output.push_str(&format!("{separator}(exit code {code})"));
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(signals: &[Signal]) -> Vec<&'static str> {
        let kind = |signal: &Signal| match signal {
            Signal::Event(EventBody::ToolStarted { .. }) => "started",
            Signal::Event(EventBody::ToolOutput { .. }) => "output",
            Signal::Event(EventBody::ToolEnded { .. }) => "ended",
            _ => "other",
        };
        signals.iter().map(kind).collect()
    }

    #[test]
    fn call_starts_once_and_ends_once() {
        let mut calls = ToolCalls::default();
        calls.open("a").set_name("bash");
        assert!(calls.is_open("a") && !calls.any_started());
        assert_eq!(kinds(&calls.start("a")), ["started"]);
        assert!(calls.any_started());
        assert_eq!(kinds(&calls.start("a")), [""; 0]);
        assert_eq!(kinds(&calls.end("a", true, "x".into())), ["ended"]);
        assert!(!calls.is_open("a") && !calls.any_started());
        assert_eq!(kinds(&calls.end("b", true, "x".into())), ["started", "ended"]);
    }

    #[test]
    fn repeated_output_is_reported_once() {
        let mut calls = ToolCalls::default();
        let text = |signals: Vec<Signal>| match &signals[..] {
            [Signal::Event(EventBody::ToolOutput { text, .. })] => text.clone(),
            _ => String::new(),
        };
        assert_eq!(text(calls.output_so_far("a", "1\n")), "1\n");
        assert_eq!(text(calls.output_so_far("a", "1\n2\n")), "2\n");
        assert_eq!(text(calls.output_so_far("a", "1\n2\n")), "");
        assert_eq!(text(calls.output_so_far("a", "…2\n3\n")), "", "its beginning was dropped");
    }

    #[test]
    fn open_calls_are_bounded() {
        let mut calls = ToolCalls::default();
        let long = "x".repeat(300 * 1024);
        for number in 0..MAX_OPEN_CALLS + 6 {
            let call = format!("{number}{long}");
            let tool = calls.open(&call);
            tool.set_name(&long);
            tool.set_input(&serde_json::json!({"text": long}));
            calls.output(&call, &long);
        }
        let bytes = |(call, tool): (&String, &ToolCall)| {
            call.len() + tool.name.len() + tool.input.len() + tool.live.len()
        };
        assert_eq!(calls.0.len(), MAX_OPEN_CALLS);
        assert!(calls.0.iter().map(bytes).sum::<usize>() < 32 * 1024 * 1024);
    }

    #[test]
    fn live_output_of_a_call_is_bounded() {
        let mut calls = ToolCalls::default();
        let mut bytes = 0;
        for _ in 0..100 {
            for signal in calls.output("a", &"é".repeat(1000)) {
                let Signal::Event(EventBody::ToolOutput { text, .. }) = signal else { panic!() };
                bytes += text.len();
            }
        }
        assert_eq!(bytes, MAX_LIVE_BYTES);
    }

    #[test]
    fn failed_exit_is_appended() {
        assert_eq!(with_exit_code("a\n".into(), Some(0)), "a\n");
        assert_eq!(with_exit_code("a\n".into(), Some(3)), "a\n(exit code 3)");
        assert_eq!(with_exit_code("a".into(), Some(3)), "a\n(exit code 3)");
        assert_eq!(with_exit_code(String::new(), None), "");
    }
}
