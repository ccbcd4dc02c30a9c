//! The scripted agent runs the script in a prompt (see [`harvest_proto::script`]) as a real process
//! of the agent's user, in the agent's cgroup, over its own line protocol. It needs no model, no
//! key and nothing of the image but a shell.
//!
//! This is the supervisor's side, [`Scripted`]; the program is the same binary in another role,
//! [`program`].

mod memory;
mod play;
pub(crate) mod program;
mod shell;
mod wire;

use std::collections::BTreeMap;

use harvest_proto::{
    EventBody,
    bridge::{AgentLaunch, TurnRequest},
    event::ToolKind,
    json,
};

use serde_json::Value;

use self::wire::{FromProgram, ToProgram};
use super::{
    Agent, AgentStart, Image, Invocation, NO_ANSWER, Signal, ToolRequest, closed_unanswered,
    images, may_ask, unknown_lines::UnknownLines,
};
use crate::truncate;

/// The role's name on the command line.
pub(crate) const ROLE: &str = "scripted-agent";

/// The state of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Scripted {
    /// Open questions: the id used outside and the program's own id.
    questions: BTreeMap<String, String>,
    asks_for_tools: bool,
    unknown: UnknownLines,
}

impl Agent for Scripted {
    fn invocation(&mut self, start: &AgentStart<'_>) -> Invocation {
        self.asks_for_tools = start.syncing;
        // The launcher runs the same binary, which has no path inside the sandbox.
        let argv = ["/proc/self/exe", ROLE, &start.launch.conversation];
        Invocation { argv: argv.map(str::to_owned).into(), ..Invocation::default() }
    }

    fn init_line(&mut self) -> Option<String> {
        None
    }

    /// It calls no model.
    fn set_model(&mut self, _launch: &AgentLaunch) -> Option<Vec<Signal>> {
        Some(Vec::new())
    }

    fn prompt(&mut self, request: &TurnRequest, images: &[Image]) -> String {
        self.unknown.reset();
        let text = images::named_in(&request.text, images);
        ToProgram::Prompt { prompt: request.prompt.clone(), text, ask: self.asks_for_tools }.line()
    }

    fn cancel(&mut self) -> Option<String> {
        Some(ToProgram::Cancel.line())
    }

    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        let Some(own) = self.questions.remove(request) else { return Vec::new() };
        let (request, answer) = (request.to_owned(), answer.to_owned());
        let closed = EventBody::RequestClosed { request, answer: Some(answer.clone()) };
        vec![Signal::Event(closed), Signal::Send(ToProgram::Answer { request: own, answer }.line())]
    }

    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal> {
        let Ok(message) = json::from_slice::<FromProgram>(line) else {
            return self.unknown.record(line);
        };
        let event = match message {
            FromProgram::Ready { remembers } => {
                return vec![Signal::Ready { is_new: remembers == 0 }];
            }
            FromProgram::Done { error } => return vec![Signal::Done(error.map_or(Ok(()), Err))],
            FromProgram::Ask { request, question, options } => {
                return self.on_question(request, question, options);
            }
            FromProgram::Text { text } => EventBody::TextDelta { text },
            FromProgram::Thought { text } => EventBody::ThoughtDelta { text },
            FromProgram::Tool { call, name, input } => {
                return self.on_tool(call, name, input);
            }
            FromProgram::Result { call, ok, output } => {
                EventBody::ToolEnded { call, ok, output, blob: None }
            }
            FromProgram::Retry { attempt, status } => {
                EventBody::Retry { attempt, after_millis: 0, status }
            }
        };
        vec![Signal::Event(event)]
    }

    fn asks_for_tools(&self) -> bool {
        self.asks_for_tools
    }

    fn answer_tool(&mut self, call: &str, refusal: Option<&str>) -> Vec<Signal> {
        let (call, refusal) = (call.to_owned(), refusal.map(str::to_owned));
        vec![Signal::Send(ToProgram::Tool { call, refusal }.line())]
    }

    fn close_questions(&mut self) -> Vec<Signal> {
        let close = |(request, own): (String, String)| {
            let refusal = ToProgram::Answer { request: own, answer: NO_ANSWER.to_owned() };
            closed_unanswered(request, refusal.line())
        };
        std::mem::take(&mut self.questions).into_iter().flat_map(close).collect()
    }
}

impl Scripted {
    fn on_tool(&self, call: String, name: String, input: Value) -> Vec<Signal> {
        let kind = kind(&name);
        let asks = ToolRequest { request: call.clone(), call: call.clone(), kind };
        let started = EventBody::ToolStarted { call, name, kind, input, parent: None, blob: None };
        let asks = self.asks_for_tools.then_some(Signal::AsksForTool(asks));
        std::iter::once(Signal::Event(started)).chain(asks).collect()
    }

    fn on_question(&mut self, own: String, question: String, options: Vec<String>) -> Vec<Signal> {
        if !may_ask(self.questions.len(), &own.as_str().into()) {
            let refusal = ToProgram::Answer { request: own, answer: NO_ANSWER.to_owned() };
            return vec![Signal::Send(refusal.line())];
        }
        let request = truncate::text(&own, truncate::MAX_NAME_BYTES);
        self.questions.insert(request.clone(), own);
        let opened = EventBody::RequestOpened { request: request.clone(), question, options };
        vec![Signal::Event(opened), Signal::Question { request }]
    }
}

fn kind(tool: &str) -> ToolKind {
    match tool {
        "Bash" => ToolKind::Execute,
        "Read" => ToolKind::Read,
        "Write" | "Edit" => ToolKind::Edit,
        "Grep" | "Glob" => ToolKind::Search,
        _ => ToolKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_in_private_keys_is_an_unknown_line() {
        let line = br#"{"say":"tool","call":"c","name":"Bash","input":{"$serde_json::private::RawValue":"[]"}}"#;
        let signals = Scripted::default().parse_line(line);
        assert!(matches!(signals[..], [Signal::Event(EventBody::AgentRaw { .. })]), "{signals:?}");
    }

    #[test]
    fn question_is_answered_once() {
        let mut scripted = Scripted::default();
        let ask = r#"{"say":"ask","request":"q1","question":"Which?","options":["a"]}"#;
        assert!(
            scripted
                .parse_line(ask.as_bytes())
                .contains(&Signal::Question { request: "q1".into() })
        );
        assert_eq!(scripted.answer("q1", "a").len(), 2);
        assert_eq!(scripted.answer("q1", "a"), []);
        scripted.parse_line(ask.as_bytes());
        assert_eq!((scripted.close_questions().len(), scripted.close_questions().len()), (2, 0));
    }

    #[test]
    fn long_question_id_is_shortened_outside() {
        let (mut scripted, long) = (Scripted::default(), "q".repeat(50_000));
        let ask =
            serde_json::json!({ "say": "ask", "request": long, "question": "?", "options": [] });
        let signals = scripted.parse_line(ask.to_string().as_bytes());
        let [Signal::Event(EventBody::RequestOpened { request, .. }), Signal::Question { .. }] =
            &signals[..]
        else {
            panic!("{signals:?}")
        };
        assert!(request.len() < 2048, "{}", request.len());
        let answer_line = ToProgram::Answer { request: long, answer: "a".into() }.line();
        assert!(
            scripted.answer(request, "a").contains(&Signal::Send(answer_line)),
            "the program's own id"
        );
    }

    #[test]
    fn lines_of_another_protocol_are_unknown() {
        let mut scripted = Scripted::default();
        for line in [&b"{}"[..], b"{\"say\":\"x\"}", b"\xff\xfe", b"null"] {
            let signals = scripted.parse_line(line);
            assert!(
                matches!(signals[..], [Signal::Event(EventBody::AgentRaw { .. })]),
                "{signals:?}"
            );
        }
    }
}
