//! Claude Code over its `stream-json` protocol, one long-lived process per sandbox.

mod command;
mod map;
mod wire;

use harvest_proto::bridge::{AgentLaunch, TurnRequest};

pub(super) use self::map::Claude;
use super::{Agent, Invocation, Signal};

impl Agent for Claude {
    fn invocation(&self, launch: &AgentLaunch, cwd: &str, resume: bool) -> Invocation {
        Invocation { argv: command::argv(launch, cwd, resume), env: &command::ENV }
    }

    fn init_line(&self) -> Option<String> {
        Some(wire::initialize())
    }

    fn prompt(&mut self, request: &TurnRequest) -> String {
        self.begin(&request.prompt);
        wire::prompt(&request.prompt, &request.text)
    }

    fn cancel(&self) -> String {
        wire::interrupt()
    }

    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        self.on_answer(request, answer)
    }

    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal> {
        self.interpret(line)
    }

    fn take_open_requests(&mut self) -> Vec<String> {
        self.take_questions()
    }
}
