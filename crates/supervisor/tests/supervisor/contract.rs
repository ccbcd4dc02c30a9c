//! The contract that every agent must fulfil. Claude Code, OpenCode and Codex are replaced by
//! scripts that speak their protocols; the scripted agent is real. `tests/e2e` runs the same tests
//! with the real programs.

use std::fs;

use harvest_proto::{
    AgentName, EventBody,
    bridge::*,
    event::{ToolKind, TurnOutcome},
};

use crate::harness::*;

/// An agent and the prompts that trigger each behaviour.
struct AgentUnderTest {
    name: AgentName,
    hello: &'static str,
    tool: &'static str,
    ask: &'static str,
    /// Starts a process whose pid is in `~/left`, writes "hanging", and then nothing.
    hang: &'static str,
    /// Writes "looping" and starts a loop whose pid is in `~/left`.
    spin: &'static str,
    crash: &'static str,
    /// Unknown lines, one of them a megabyte, then "after".
    garbage: &'static str,
    /// Ends the turn with a title or an unknown line, but without output.
    mute: &'static str,
    history: &'static str,
    /// A thousand events of 30,000 bytes.
    flood: &'static str,
    /// A tool call with 200,000 bytes of output: a line `begin`, many `x`, a line `end`.
    long: &'static str,
}

const CLAUDE: AgentUnderTest = AgentUnderTest {
    name: AgentName::Claude,
    hello: "say hello",
    tool: "use a tool",
    ask: "ask me",
    hang: "hang please",
    spin: "loop",
    crash: "crash now",
    garbage: "garbage",
    mute: "mute",
    history: "history",
    flood: "flood me",
    long: "long output",
};

const OPENCODE: AgentUnderTest = AgentUnderTest { name: AgentName::Opencode, ..CLAUDE };

const CODEX: AgentUnderTest = AgentUnderTest { name: AgentName::Codex, ..CLAUDE };

const SCRIPTED: AgentUnderTest = AgentUnderTest {
    name: AgentName::Scripted,
    hello: r#"script: [{"bash":"echo $PPID >~/pid"},{"text":"Hello"}]"#,
    tool: r#"script: [{"bash":"echo made"}]"#,
    ask: r#"script: [{"ask":{"question":"Colour?","options":["red"]}},{"text":"thanks"}]"#,
    hang: r#"script: [{"bash":"(setsid sleep 98765 & echo $! >~/left)"},{"text":"hanging","chunks":1},{"hang":600}]"#,
    spin: r#"script: [{"text":"looping","chunks":1},{"bash":"setsid sh -c 'echo $$ >~/left; while :; do sleep 1; done' & wait"}]"#,
    crash: r#"script: [{"stderr":"last words"},{"crash":3}]"#,
    garbage: r#"script: [{"raw":"not json"},{"garbage":3},{"garbage":1000000},{"text":"after","chunks":1}]"#,
    mute: r#"script: [{"raw":"not json"}]"#,
    history: r#"script: [{"history":true}]"#,
    flood: r#"script: [{"flood":{"events":1000,"bytes":30000}}]"#,
    long: r#"script: [{"bash":"echo begin; head -c 199990 /dev/zero | tr '\\0' x; echo; echo end"}]"#,
};

impl AgentUnderTest {
    fn start(&self) -> (Sandbox, Client) {
        let sandbox = Sandbox::start();
        let mut owner = sandbox.owner(1, 0);
        sandbox.booted_with(&mut owner, self.name.clone());
        (sandbox, owner)
    }

    /// Asserts that the next prompt completes.
    fn next_prompt_completes(&self, owner: &mut Client) {
        owner.prompt(self.hello);
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    }

    fn text_is_streamed(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.hello);
        let text = |owner: &Client| {
            let texts = owner.events.iter().filter_map(|event| match &event.body {
                EventBody::TextDelta { text } => Some(text.as_str()),
                _ => None,
            });
            texts.collect::<String>()
        };
        owner.until(|owner| (text(owner) == "Hello").then_some(()));
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        self.next_prompt_completes(&mut owner);
    }

    fn tool_call_starts_and_ends(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.tool);
        let started = owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
        let EventBody::ToolStarted { call, kind, input, .. } = started else { unreachable!() };
        assert_eq!((kind, input["command"].as_str()), (ToolKind::Execute, Some("echo made")));
        let ended = owner.event(|body| matches!(body, EventBody::ToolEnded { .. }));
        let EventBody::ToolEnded { call: of, ok, output, .. } = ended else { unreachable!() };
        assert_eq!((of, ok, output.trim()), (call, true, "made"));
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        self.next_prompt_completes(&mut owner);
    }

    fn question_is_asked_and_answered(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.ask);
        let opened = owner.event(|body| matches!(body, EventBody::RequestOpened { .. }));
        let EventBody::RequestOpened { request, question, options } = opened else {
            unreachable!()
        };
        assert_eq!((question.as_str(), &options[..]), ("Colour?", &["red".to_owned()][..]));
        let answer =
            |id| ToSupervisor::Answer { id, request: request.clone(), answer: "red".into() };
        assert_eq!(owner.request(answer), Ok(Reply::Done));
        assert_eq!(owner.request(answer).unwrap_err().code, FaultCode::NotFound);
        owner.event(
            |body| matches!(body, EventBody::RequestClosed { answer: Some(said), .. } if said == "red"),
        );
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        self.next_prompt_completes(&mut owner);
    }

    fn stop_closes_an_open_question(&self) {
        let (_sandbox, mut owner) = self.start();
        let (_, turn) = owner.prompt(self.ask);
        owner.event(|body| matches!(body, EventBody::RequestOpened { .. }));
        owner.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
        owner.event(|body| matches!(body, EventBody::RequestClosed { answer: None, .. }));
        assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
        self.next_prompt_completes(&mut owner);
    }

    fn question_outside_a_turn_is_refused(&self) {
        let (sandbox, mut owner) = self.start();
        owner.prompt("ask me afterwards");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        let warning = owner.event(|body| {
            assert!(!matches!(body, EventBody::RequestOpened { .. }), "nobody can answer it");
            matches!(body, EventBody::Warning { .. })
        });
        assert!(
            matches!(&warning, EventBody::Warning { message } if message.contains("Colour?")),
            "{warning:?}"
        );
        wait_until("the agent is answered", || sandbox.at("home/answers").exists());
        self.next_prompt_completes(&mut owner);
    }

    fn stopped(&self, prompt: &str, said: &str) {
        let (sandbox, mut owner) = self.start();
        let (_, turn) = owner.prompt(prompt);
        owner.text(said);
        let left = sandbox.at("home/left");
        wait_until("the agent has started a process", || {
            fs::read_to_string(&left).is_ok_and(|pid| is_alive(&pid))
        });
        let left = fs::read_to_string(left).unwrap();
        assert_eq!(owner.request(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
        assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
        assert!(!is_alive(&left), "a process of the agent is still alive");
        self.next_prompt_completes(&mut owner);
    }

    fn stop_of_a_hanging_agent_leaves_nothing(&self) {
        self.stopped(self.hang, "hanging");
    }

    fn stop_of_a_shell_loop_leaves_nothing(&self) {
        self.stopped(self.spin, "looping");
    }

    fn crash_fails_the_turn_and_keeps_the_conversation(&self) {
        let (_sandbox, mut owner) = self.start();
        self.next_prompt_completes(&mut owner);
        owner.prompt(self.crash);
        let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
        let EventBody::AgentExited { exit, tail, restarts } = exited else { unreachable!() };
        assert_eq!((exit, tail.as_str(), restarts), (Exit::Code(3), "last words", true));
        assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
        // Accepted at once, executed after the restart.
        owner.prompt(self.history);
        let delta = owner.event(|body| matches!(body, EventBody::TextDelta { .. }));
        let EventBody::TextDelta { text } = delta else { unreachable!() };
        let remembered: u32 = text.split(' ').nth(2).unwrap().parse().unwrap();
        assert!(remembered >= 1, "{text}");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    }

    fn crash_while_idle_is_reported_and_restarted(&self) {
        let (sandbox, mut owner) = self.start();
        self.next_prompt_completes(&mut owner);
        kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
        let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
        assert!(matches!(
            exited,
            EventBody::AgentExited { exit: Exit::Signal(9), restarts: true, .. }
        ));
        self.next_prompt_completes(&mut owner);
    }

    fn six_crashes_in_a_row_end_restarts(&self) {
        let (_sandbox, mut owner) = self.start();
        for crash in 1..=6 {
            owner.prompt(self.crash);
            let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
            let EventBody::AgentExited { restarts, .. } = exited else { unreachable!() };
            assert_eq!((crash, restarts), (crash, crash < 6));
            assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
        }
        let refused = owner
            .request(|id| ToSupervisor::Prompt { id, prompt: Box::new(turn_request(self.hello)) });
        let fault = refused.unwrap_err();
        assert_eq!(fault.code, FaultCode::NotReady);
        assert_eq!(fault.message, "the agent exited with code 3 and is not restarted");
        assert_eq!(owner.sh("echo still here").1, "still here\n");
    }

    fn completed_turn_resets_the_crash_count(&self) {
        let (_sandbox, mut owner) = self.start();
        for _ in 0..4 {
            for _ in 0..2 {
                owner.prompt(self.crash);
                assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
            }
            self.next_prompt_completes(&mut owner);
        }
    }

    fn unknown_lines_are_truncated_and_harmless(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.garbage);
        let mut lengths = Vec::new();
        for _ in 0..3 {
            let raw = owner.event(|body| matches!(body, EventBody::AgentRaw { .. }));
            let EventBody::AgentRaw { line } = raw else { unreachable!() };
            lengths.push(line.len());
        }
        assert!(lengths[2] > 1000 && lengths.iter().all(|length| *length <= 4096), "{lengths:?}");
        owner.text("after");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        self.next_prompt_completes(&mut owner);
    }

    fn turn_without_any_output_fails(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.mute);
        let ended = owner.event(|body| matches!(body, EventBody::TurnEnded { .. }));
        let EventBody::TurnEnded { outcome, error, .. } = ended else { unreachable!() };
        assert_eq!(outcome, TurnOutcome::Failed);
        assert_eq!(error.as_deref(), Some("the agent ended its turn without any output"));
        self.next_prompt_completes(&mut owner);
    }

    fn flood_is_held_back_without_loss(&self) {
        let (sandbox, mut owner) = self.start();
        let stored = owner.stored;
        owner.send(ToSupervisor::EventsStored { upto: stored });
        owner.prompt(self.flood);
        drop(owner);
        // Of 30 MB the outbox holds two; then the agent is not read any more.
        let mut probe = sandbox.client();
        let mut last = 0;
        let mut same = 0;
        wait_until("the outbox is full", || {
            let Ok(Reply::Status(status)) = probe.request(|id| ToSupervisor::Status { id }) else {
                panic!()
            };
            same = if status.last_event == last { same + 1 } else { 0 };
            last = status.last_event;
            same > 40 && last > stored + 20
        });
        // Some agents report the start of each call, too.
        assert!(last - stored < 160, "{} events wait", last - stored);
        let mut owner = sandbox.owner(1, stored);
        let mut received = 0;
        let outcome = loop {
            owner.until(|owner| (!owner.events.is_empty()).then_some(()));
            let upto = owner.stored;
            owner.send(ToSupervisor::EventsStored { upto });
            let events = std::mem::take(&mut owner.events);
            received += events
                .iter()
                .filter(|event| matches!(event.body, EventBody::ToolEnded { .. }))
                .count();
            let ended = events.iter().find_map(|event| match &event.body {
                EventBody::TurnEnded { outcome, .. } => Some(*outcome),
                _ => None,
            });
            if let Some(outcome) = ended {
                break outcome;
            }
        };
        assert_eq!((received, outcome), (1000, TurnOutcome::Completed));
        let peak = sandbox.memory_kib("VmHWM");
        assert!(peak < 24 * 1024, "{peak} KiB");
    }

    fn long_output_is_available_until_stored(&self) {
        let (sandbox, mut owner) = self.start();
        owner.prompt(self.long);
        let ended = owner.event(|body| matches!(body, EventBody::ToolEnded { .. }));
        let upto = owner.stored;
        let EventBody::ToolEnded { output, blob: Some(blob), .. } = ended else {
            panic!("{ended:?}")
        };
        assert!(
            output.len() < 70_000
                && output.starts_with("begin")
                && output.trim_end().ends_with("end")
        );
        let wanted = blob.id.clone();
        let ask = |id| ToSupervisor::Blob { id, blob: wanted.clone(), stream: 77 };
        assert_eq!(sandbox.client().request(ask).unwrap_err().code, FaultCode::NotOwner);
        assert_eq!(owner.request(ask), Ok(Reply::Done));
        owner.until(|owner| owner.ended.contains(&77).then_some(()));
        let whole = String::from_utf8(owner.data.remove(&77).unwrap()).unwrap();
        assert_eq!(whole.len() as u64, blob.bytes);
        assert_eq!(whole.trim_end(), format!("begin\n{}\nend", "x".repeat(199_990)));
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        owner.send(ToSupervisor::EventsStored { upto });
        assert_eq!(owner.request(ask).unwrap_err().code, FaultCode::NotFound);
        self.next_prompt_completes(&mut owner);
    }

    fn repeated_prompt_runs_once(&self) {
        let (_sandbox, mut owner) = self.start();
        let request = turn_request(self.hello);
        for _ in 0..2 {
            let prompt = Box::new(request.clone());
            assert_eq!(owner.request(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
        }
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        let prompt = Box::new(request.clone());
        assert_eq!(owner.request(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
        owner.prompt(self.tool);
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        assert!(
            !owner.events.iter().any(|event| matches!(event.body, EventBody::TurnStarted { .. }))
        );
    }
}

macro_rules! fulfil {
    ($agent:ident: $($rule:ident),*) => {
        $(#[test] fn $rule() { super::$agent.$rule(); })*
    };
}

macro_rules! every_agent {
    ($($rule:ident),* $(,)?) => {
        mod claude { fulfil!(CLAUDE: $($rule),*); }
        mod opencode { fulfil!(OPENCODE: $($rule),*); }
        mod codex { fulfil!(CODEX: $($rule),*); }
        mod scripted { fulfil!(SCRIPTED: $($rule),*); }
    };
}

every_agent! {
    text_is_streamed,
    tool_call_starts_and_ends,
    stop_of_a_hanging_agent_leaves_nothing,
    stop_of_a_shell_loop_leaves_nothing,
    crash_fails_the_turn_and_keeps_the_conversation,
    crash_while_idle_is_reported_and_restarted,
    six_crashes_in_a_row_end_restarts,
    completed_turn_resets_the_crash_count,
    unknown_lines_are_truncated_and_harmless,
    turn_without_any_output_fails,
    flood_is_held_back_without_loss,
    long_output_is_available_until_stored,
    repeated_prompt_runs_once,
}

/// Agents that can ask the user.
mod asking {
    use super::*;

    macro_rules! asks {
        ($($name:ident: $agent:ident),*) => { $(
            mod $name {
                fulfil!($agent: question_is_asked_and_answered, stop_closes_an_open_question);
            }
        )* };
    }

    asks!(claude: CLAUDE, codex: CODEX, scripted: SCRIPTED);

    #[test]
    fn question_outside_a_turn_is_refused() {
        CLAUDE.question_outside_a_turn_is_refused();
        CODEX.question_outside_a_turn_is_refused();
    }
}
