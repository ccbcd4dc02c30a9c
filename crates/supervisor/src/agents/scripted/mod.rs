//! The scripted agent: plays the script a prompt carries (see [`harvest_proto::script`]) as a real process
//! of the agent's user, in the agent's cgroup, over a line protocol of its own. No model, no key, no cost,
//! and nothing of the image but a shell.
//!
//! This is the supervisor's side, [`Scripted`]; the program itself is the supervisor's own file in another
//! role, [`program`].

mod memory;
mod play;
pub(crate) mod program;
mod shell;
mod wire;

use std::collections::BTreeMap;

use harvest_proto::{
    EventBody,
    bridge::{AgentLaunch, PromptOrder},
};

use self::wire::{FromProgram, ToProgram};
use super::{Agent, Invocation, Signal, noise::Noise};
use crate::cut;

/// The role's name on the command line.
pub(crate) const ROLE: &str = "scripted-agent";

/// The state of a conversation, as far as its lines need it.
#[derive(Debug, Default)]
pub(crate) struct Scripted {
    /// Its open questions: what the outside calls them, and what the program does.
    asked: BTreeMap<String, String>,
    noise: Noise,
}

impl Agent for Scripted {
    fn invocation(&self, launch: &AgentLaunch, _cwd: &str, _resume: bool) -> Invocation {
        // Its launcher runs the same file, which no path inside leads to.
        let argv = ["/proc/self/exe", ROLE, &launch.conversation];
        Invocation { argv: argv.map(str::to_owned).into(), env: &[] }
    }

    fn greeting(&self) -> Option<String> {
        None
    }

    fn prompt(&mut self, order: &PromptOrder) -> String {
        self.noise.begin();
        ToProgram::Prompt { prompt: order.prompt.clone(), text: order.text.clone() }.line()
    }

    fn cancel(&self) -> String {
        ToProgram::Cancel.line()
    }

    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        let Some(own) = self.asked.remove(request) else { return Vec::new() };
        let (request, answer) = (request.to_owned(), answer.to_owned());
        let closed = EventBody::RequestClosed { request, answer: Some(answer.clone()) };
        vec![Signal::Event(closed), Signal::Say(ToProgram::Answer { request: own, answer }.line())]
    }

    fn hear(&mut self, line: &[u8]) -> Vec<Signal> {
        let Ok(message) = serde_json::from_slice::<FromProgram>(line) else {
            return self.noise.hear(line);
        };
        let event = match message {
            FromProgram::Ready { .. } => return vec![Signal::Ready],
            FromProgram::Done { error } => return vec![Signal::Done(error.map_or(Ok(()), Err))],
            FromProgram::Ask { request, question, options } => {
                return self.asked(request, question, options);
            }
            FromProgram::Text { text } => EventBody::TextDelta { text },
            FromProgram::Thought { text } => EventBody::ThoughtDelta { text },
            FromProgram::Tool { call, name, input } => {
                EventBody::ToolStarted { call, name, input, parent: None, blob: None }
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

    fn drop_requests(&mut self) -> Vec<String> {
        std::mem::take(&mut self.asked).into_keys().collect()
    }
}

impl Scripted {
    fn asked(&mut self, own: String, question: String, options: Vec<String>) -> Vec<Signal> {
        let request = cut::text(&own, cut::MAX_NAME_BYTES);
        self.asked.insert(request.clone(), own);
        let opened = EventBody::RequestOpened { request: request.clone(), question, options };
        vec![Signal::Event(opened), Signal::Asked { request }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_answered_once_and_open_ones_are_named() {
        let mut scripted = Scripted::default();
        let ask = r#"{"say":"ask","request":"q1","question":"Which?","options":["a"]}"#;
        assert!(scripted.hear(ask.as_bytes()).contains(&Signal::Asked { request: "q1".into() }));
        assert_eq!(scripted.answer("q1", "a").len(), 2);
        assert_eq!(scripted.answer("q1", "a"), []);
        scripted.hear(ask.as_bytes());
        assert_eq!(
            (scripted.drop_requests(), scripted.drop_requests()),
            (vec!["q1".to_owned()], vec![])
        );
    }

    #[test]
    fn a_question_with_a_long_name_is_answered_by_a_short_one() {
        let (mut scripted, long) = (Scripted::default(), "q".repeat(100_000));
        let ask =
            serde_json::json!({ "say": "ask", "request": long, "question": "?", "options": [] });
        let signals = scripted.hear(ask.to_string().as_bytes());
        let [Signal::Event(EventBody::RequestOpened { request, .. }), Signal::Asked { .. }] =
            &signals[..]
        else {
            panic!("{signals:?}")
        };
        assert!(request.len() < 2048, "{}", request.len());
        let told = ToProgram::Answer { request: long, answer: "a".into() }.line();
        assert!(
            scripted.answer(request, "a").contains(&Signal::Say(told)),
            "the program's own name of it"
        );
    }

    #[test]
    fn a_line_of_another_protocol_is_noise() {
        let mut scripted = Scripted::default();
        for line in [&b"{}"[..], b"{\"say\":\"x\"}", b"\xff\xfe", b"null"] {
            let signals = scripted.hear(line);
            assert!(
                matches!(signals[..], [Signal::Event(EventBody::AgentRaw { .. })]),
                "{signals:?}"
            );
        }
    }
}
