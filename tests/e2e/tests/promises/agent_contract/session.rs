//! A session of the agent under test: prompts, their ends, and what the agent remembers.

use std::fs;

use harvest_e2e::{Host, eventually, unique};
use harvest_proto::{
    Event, EventBody, SessionId,
    api::{Prompt, SessionState},
    event::{SnapshotKind, TurnOutcome},
};
use serde_json::{Value, json};

use super::matrix::Row;
use crate::{SAMPLE, app_folder::SERVER, faults_inside::supervisor};

/// An agent and what differs between agents.
#[derive(Clone)]
pub(super) struct Agent {
    pub(super) name: &'static str,
    /// An argument on its command line.
    pub(super) argument: &'static str,
    /// The tool that keeps its plan, and an input.
    pub(super) plan: (&'static str, Value),
}

/// A turn that has ended.
pub(super) struct Turn {
    pub(super) outcome: TurnOutcome,
    pub(super) error: Option<String>,
    pub(super) events: Vec<EventBody>,
}

impl Turn {
    pub(super) fn text(&self) -> String {
        let text = |body: &EventBody| match body {
            EventBody::TextDelta { text } => Some(text.clone()),
            _ => None,
        };
        self.events.iter().filter_map(text).collect()
    }

    pub(super) fn has(&self, wanted: impl Fn(&EventBody) -> bool) -> bool {
        self.events.iter().any(wanted)
    }
}

pub(super) struct UnderTest {
    pub(super) host: Host,
    pub(super) agent: Agent,
    pub(super) session: SessionId,
    pub(super) rows: Vec<Row>,
    /// An argument of the MCP server of the repository, by which its processes are found.
    pub(super) server: String,
    /// The last event before the last prompt.
    before: u64,
    /// The number of earlier prompts in the last model request.
    remembered: u32,
}

impl UnderTest {
    /// The first turn: everything that an agent can say and do.
    pub(super) async fn begin(host: Host, agent: Agent) -> Self {
        let server = unique();
        let config = json!({ "mcpServers": {
            "greeter": { "command": "python3", "args": ["server.py", server] },
        } })
        .to_string();
        let files = [SAMPLE, &[(".mcp.json", &*config), ("server.py", SERVER)]].concat();
        host.repository("calc", &files).await;
        let (plan, input) = &agent.plan;
        let script = json!([
            [{ "thinking": "hmm" }, { "text": "Let me see." },
             { "bash": "id -u; for i in 1 2 3; do echo $i; sleep 0.3; done" }],
            [{ "tool": { "name": plan, "input": input } }],
            [{ "tool": { "name": "mcp__greeter__hello", "input": {} } }],
            { "text": "ready" },
        ]);
        let session = host.session_of(agent.name, "calc", "Begin.", &script).await.id;
        let mut test =
            Self { host, agent, session, rows: Vec::new(), server, before: 0, remembered: 0 };
        test.abilities().await;
        test.remembers().await;
        test.questions().await;
        test
    }

    async fn abilities(&mut self) {
        let first = super::faults::prompts(&self.host, &self.session).await.remove(0);
        let turn = self.end(&first).await;
        assert_eq!(turn.outcome, TurnOutcome::Completed, "{:?}", turn.error);
        assert!(turn.text().contains("Let me see.") && turn.text().contains("ready"));
        let output = |part: &'static str| move |body: &EventBody| matches!(body, EventBody::ToolEnded { output, .. } if output.contains(part));
        assert!(turn.has(output("10001")), "tools run as the agent's user: {:?}", turn.events);
        self.row("streams text and runs tools as its user", "yes");
        let said = |wanted: fn(&EventBody) -> bool| if turn.has(wanted) { "yes" } else { "no" };
        let thoughts = said(|body| matches!(body, EventBody::ThoughtDelta { .. }));
        let plan = said(|body| matches!(body, EventBody::Plan { .. }));
        let live = said(|body| matches!(body, EventBody::ToolOutput { .. }));
        let version = said(|body| matches!(body, EventBody::AgentReady { version: Some(_), .. }));
        let servers = if turn.has(output("greetings from")) { "yes" } else { "no" };
        self.row("reports its version", version);
        self.row("reports thoughts", thoughts);
        self.row("reports its plan", plan);
        self.row("reports the output of a running tool", live);
        self.row("uses MCP servers of the repository", servers);
        let saved = |body: &EventBody| {
            matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Turn, .. })
        };
        self.wait("the snapshot of turn 1", saved).await;
    }

    // An agent without a tool for questions fails the turn at once.
    async fn questions(&mut self) {
        let question = json!({ "question": "Which colour?", "options": ["red", "blue"] });
        let prompt = self.send("Ask.", &json!([[{ "ask": question }], { "text": "thanks" }])).await;
        let opened = |body: &EventBody| {
            matches!(body, EventBody::RequestOpened { .. } | EventBody::TurnEnded { .. })
        };
        let event = self.wait("a question", opened).await;
        let asks = matches!(event.body, EventBody::RequestOpened { .. });
        if asks {
            self.host.wait_for(&self.session, SessionState::NeedsInput).await;
            assert_eq!(self.host.harvest(["send", &self.session.to_string(), "blue"]).code, 0);
            assert_eq!(self.end(&prompt).await.outcome, TurnOutcome::Completed);
        }
        self.row("asks the user", if asks { "yes" } else { "no" });
        self.remembers().await;
    }

    pub(super) fn row(&mut self, title: &'static str, cell: &'static str) {
        self.rows.push((title, cell));
    }

    pub(super) async fn send(&mut self, prompt: &str, script: &Value) -> Prompt {
        self.before = self.host.show(&self.session).await.seq;
        self.host.prompt(&self.session, prompt, script).await
    }

    /// Waits for an event since the last prompt.
    pub(super) async fn wait(&self, what: &str, wanted: impl Fn(&EventBody) -> bool) -> Event {
        self.host.follow(self.session.clone()).after(self.before, what, wanted).await
    }

    /// Sends a prompt whose answer begins with a text and then stays silent; waits for the text.
    pub(super) async fn hang(&mut self) -> Prompt {
        let script = json!([[{ "text": "waiting", "chunks": 1 }, { "hang": 600 }]]);
        let prompt = self.send("Wait.", &script).await;
        self.wait("the text", |body| matches!(body, EventBody::TextDelta { .. })).await;
        prompt
    }

    pub(super) async fn end(&self, prompt: &Prompt) -> Turn {
        let mut follower = self.host.follow(self.session.clone());
        let of = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id);
        let ended = follower.after(self.before, "the end of the turn", of).await;
        let EventBody::TurnEnded { outcome, error, .. } = ended.body else { unreachable!() };
        let since = follower.seen.into_iter().filter(|event| event.seq > self.before);
        Turn { outcome, error, events: since.map(|event| event.body).collect() }
    }

    pub(super) async fn run(&mut self, prompt: &str, script: &Value) -> Turn {
        let prompt = self.send(prompt, script).await;
        self.end(&prompt).await
    }

    pub(super) async fn completes(&mut self, prompt: &str, script: &Value) -> Turn {
        let turn = self.run(prompt, script).await;
        assert_eq!(turn.outcome, TurnOutcome::Completed, "{:?} {:?}", turn.error, turn.events);
        turn
    }

    pub(super) async fn stop(&mut self, prompt: &Prompt) {
        self.host.post(&format!("/v1/sessions/{}/stop", self.session), json!({})).await;
        assert_eq!(self.end(prompt).await.outcome, TurnOutcome::Stopped);
    }

    /// Asserts that the next model request has every earlier prompt that was answered: more of them
    /// than the last one.
    pub(super) async fn remembers(&mut self) {
        let now = self.history().await;
        assert!(now > self.remembered, "{now} prompts, {} before", self.remembered);
        self.remembered = now;
    }

    /// The number of answered prompts in the next model request.
    pub(super) async fn history(&mut self) -> u32 {
        let turn = self.completes("Remember?", &json!([{ "history": true }])).await;
        let text = turn.text();
        // Without a model there is no request that could have the texts.
        let first = "The first was “Begin.”, answered with “Let me see.”.";
        assert!(self.agent.name == "scripted" || text.contains(first), "{text}");
        let number = text.split("I remember ").nth(1).and_then(|rest| rest.split(' ').next());
        number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{text}"))
    }

    /// The agent's process, as the host sees it.
    pub(super) async fn process(&self) -> u32 {
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let sandbox = namespace(supervisor(&self.host, &self.session).await);
        eventually("the agent's process", || async {
            let named = harvest_e2e::processes_with(self.agent.argument).into_iter();
            named.into_iter().find(|pid| namespace(*pid) == sandbox)
        })
        .await
    }
}
