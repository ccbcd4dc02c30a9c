//! Claude Code over its own line protocol (`stream-json`), one long-lived process per sandbox.

mod command;
mod map;
mod wire;

use harvest_proto::bridge::{AgentLaunch, PromptOrder};

pub(super) use self::map::Claude;
use super::{Agent, Invocation, Signal};

impl Agent for Claude {
    fn invocation(&self, launch: &AgentLaunch, cwd: &str, resume: bool) -> Invocation {
        Invocation { argv: command::argv(launch, cwd, resume), env: &command::ENV }
    }

    fn greeting(&self) -> Option<String> {
        Some(wire::initialize())
    }

    fn prompt(&mut self, order: &PromptOrder) -> String {
        self.begin(&order.prompt);
        wire::prompt(&order.prompt, &order.text)
    }

    fn cancel(&self) -> String {
        wire::interrupt()
    }

    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        self.answered(request, answer)
    }

    fn hear(&mut self, line: &[u8]) -> Vec<Signal> {
        self.line(line)
    }

    fn drop_requests(&mut self) -> Vec<String> {
        self.forget_requests()
    }
}
