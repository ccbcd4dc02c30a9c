//! What every agent must do, whichever it is. Claude Code is played by a script that speaks its protocol;
//! the scripted agent is the real one. `tests/e2e` asks the same of the real Claude Code.

use std::fs;

use harvest_proto::{
    EventBody,
    bridge::*,
    event::{BootPhase, PhaseStatus, TurnOutcome},
};

use crate::harness::*;

/// An agent and how it is asked for what a rule needs.
struct Kind {
    name: &'static str,
    hello: &'static str,
    tool: &'static str,
    ask: &'static str,
    /// Leaves a process whose pid is in `~/left`, says "hanging", and is silent.
    hang: &'static str,
    /// Leaves a loop whose pid is in `~/left`, after saying "looping".
    spin: &'static str,
    crash: &'static str,
    /// Lines without meaning, one of them a megabyte, then "after".
    garbage: &'static str,
    history: &'static str,
    /// A thousand events of 30,000 bytes.
    flood: &'static str,
    /// A tool call that says 200,000 bytes: a line `begin`, many `x`, a line `end`.
    long: &'static str,
}

const CLAUDE: Kind = Kind {
    name: "claude",
    hello: "say hello",
    tool: "use a tool",
    ask: "ask me",
    hang: "hang please",
    spin: "loop",
    crash: "crash now",
    garbage: "garbage",
    history: "history",
    flood: "flood me",
    long: "long output",
};

const SCRIPTED: Kind = Kind {
    name: "scripted",
    hello: r#"script: [{"bash":"echo $PPID >~/pid"},{"text":"Hello"}]"#,
    tool: r#"script: [{"bash":"echo made"}]"#,
    ask: r#"script: [{"ask":{"question":"Colour?","options":["red"]}},{"text":"thanks"}]"#,
    hang: r#"script: [{"bash":"(setsid sleep 98765 & echo $! >~/left)"},{"text":"hanging","chunks":1},{"hang":600}]"#,
    spin: r#"script: [{"text":"looping","chunks":1},{"bash":"setsid sh -c 'echo $$ >~/left; while :; do sleep 1; done' & wait"}]"#,
    crash: r#"script: [{"stderr":"last words"},{"crash":3}]"#,
    garbage: r#"script: [{"raw":"not json"},{"garbage":3},{"garbage":1000000},{"text":"after","chunks":1}]"#,
    history: r#"script: [{"history":true}]"#,
    flood: r#"script: [{"flood":{"events":1000,"bytes":30000}}]"#,
    long: r#"script: [{"bash":"echo begin; head -c 199990 /dev/zero | tr '\\0' x; echo; echo end"}]"#,
};

impl Kind {
    fn start(&self) -> (Sandbox, Client) {
        let sandbox = Sandbox::start();
        let mut owner = sandbox.owner(1, 0);
        sandbox.booted_with(&mut owner, self.name);
        (sandbox, owner)
    }

    /// Whatever came before, a prompt is carried out.
    fn goes_on(&self, owner: &mut Client) {
        owner.prompt(self.hello);
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    }

    fn text_comes_in_pieces(&self) {
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
        self.goes_on(&mut owner);
    }

    fn a_tool_call_starts_and_ends(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.tool);
        let started = owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
        let EventBody::ToolStarted { call, name, input, .. } = started else { unreachable!() };
        assert_eq!((name.as_str(), input["command"].as_str()), ("Bash", Some("echo made")));
        let ended = owner.event(|body| matches!(body, EventBody::ToolEnded { .. }));
        let EventBody::ToolEnded { call: of, ok, output, .. } = ended else { unreachable!() };
        assert_eq!((of, ok, output.trim()), (call, true, "made"));
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        self.goes_on(&mut owner);
    }

    fn a_question_reaches_a_person_and_the_answer_the_agent(&self) {
        let (_sandbox, mut owner) = self.start();
        owner.prompt(self.ask);
        let opened = owner.event(|body| matches!(body, EventBody::RequestOpened { .. }));
        let EventBody::RequestOpened { request, question, options } = opened else {
            unreachable!()
        };
        assert_eq!((question.as_str(), &options[..]), ("Colour?", &["red".to_owned()][..]));
        let answer =
            |id| ToSupervisor::Answer { id, request: request.clone(), answer: "red".into() };
        assert_eq!(owner.ask(answer), Ok(Reply::Done));
        assert_eq!(owner.ask(answer).unwrap_err().code, FaultCode::NotFound);
        owner.event(
            |body| matches!(body, EventBody::RequestClosed { answer: Some(said), .. } if said == "red"),
        );
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        self.goes_on(&mut owner);
    }

    fn a_stop_while_it_asks_closes_the_question(&self) {
        let (_sandbox, mut owner) = self.start();
        let (_, turn) = owner.prompt(self.ask);
        owner.event(|body| matches!(body, EventBody::RequestOpened { .. }));
        owner.ask(|id| ToSupervisor::Stop { id, turn }).unwrap();
        owner.event(|body| matches!(body, EventBody::RequestClosed { answer: None, .. }));
        assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
        self.goes_on(&mut owner);
    }

    fn stopped(&self, prompt: &str, said: &str) {
        let (sandbox, mut owner) = self.start();
        let (_, turn) = owner.prompt(prompt);
        owner.text(said);
        let left = sandbox.at("home/left");
        wait_until("it leaves a process", || {
            fs::read_to_string(&left).is_ok_and(|pid| lives(&pid))
        });
        let left = fs::read_to_string(left).unwrap();
        assert_eq!(owner.ask(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
        assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
        assert!(!lives(&left), "what the agent left behind lives on");
        self.goes_on(&mut owner);
    }

    fn a_stop_while_it_hangs_leaves_nothing(&self) {
        self.stopped(self.hang, "hanging");
    }

    fn a_stop_in_a_shell_loop_leaves_nothing(&self) {
        self.stopped(self.spin, "looping");
    }

    fn a_crash_fails_its_turn_and_the_conversation_is_resumed(&self) {
        let (_sandbox, mut owner) = self.start();
        self.goes_on(&mut owner);
        owner.prompt(self.crash);
        let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
        let EventBody::AgentExited { exit, tail, restarts } = exited else { unreachable!() };
        assert_eq!((exit, tail.as_str(), restarts), (Exit::Code(3), "last words", true));
        assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
        // Accepted at once, carried out when the agent is back.
        owner.prompt(self.history);
        let told = owner.event(|body| matches!(body, EventBody::TextDelta { .. }));
        let EventBody::TextDelta { text } = told else { unreachable!() };
        let remembered: u32 = text.split(' ').nth(2).unwrap().parse().unwrap();
        assert!(remembered >= 1, "{text}");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    }

    fn a_crash_while_idle_is_told_and_made_good(&self) {
        let (sandbox, mut owner) = self.start();
        self.goes_on(&mut owner);
        kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
        let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
        assert!(matches!(
            exited,
            EventBody::AgentExited { exit: Exit::Signal(9), restarts: true, .. }
        ));
        self.goes_on(&mut owner);
    }

    fn six_crashes_in_a_row_are_enough(&self) {
        let (_sandbox, mut owner) = self.start();
        for crash in 1..=6 {
            owner.prompt(self.crash);
            let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
            let EventBody::AgentExited { restarts, .. } = exited else { unreachable!() };
            assert_eq!((crash, restarts), (crash, crash < 6));
            assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
        }
        let refused =
            owner.ask(|id| ToSupervisor::Prompt { id, prompt: Box::new(order(self.hello)) });
        let fault = refused.unwrap_err();
        assert_eq!(fault.code, FaultCode::NotReady);
        assert_eq!(fault.message, "the agent exited with code 3 and is not started again");
        assert_eq!(owner.sh("echo still here").1, "still here\n");
    }

    fn a_turn_that_ends_well_starts_the_count_of_crashes_anew(&self) {
        let (_sandbox, mut owner) = self.start();
        for _ in 0..4 {
            for _ in 0..2 {
                owner.prompt(self.crash);
                assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
            }
            self.goes_on(&mut owner);
        }
    }

    fn lines_without_meaning_are_kept_short_and_stop_nothing(&self) {
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
        self.goes_on(&mut owner);
    }

    fn a_flood_waits_for_its_owner_and_loses_nothing(&self) {
        let (sandbox, mut owner) = self.start();
        let stored = owner.stored;
        owner.say(ToSupervisor::EventsStored { upto: stored });
        owner.prompt(self.flood);
        drop(owner);
        // 30 MB wait to be told. The outbox holds two of them; then nobody reads the agent any more.
        let mut probe = sandbox.guest();
        let mut last = 0;
        let mut same = 0;
        wait_until("the outbox is full", || {
            let Ok(Reply::Status(status)) = probe.ask(|id| ToSupervisor::Status { id }) else {
                panic!()
            };
            same = if status.last_event == last { same + 1 } else { 0 };
            last = status.last_event;
            same > 40 && last > stored + 20
        });
        assert!(last - stored < 80, "{} events wait", last - stored);
        let mut owner = sandbox.owner(1, stored);
        let mut heard = 0;
        let outcome = loop {
            owner.until(|owner| (!owner.events.is_empty()).then_some(()));
            let upto = owner.stored;
            owner.say(ToSupervisor::EventsStored { upto });
            let events = std::mem::take(&mut owner.events);
            heard += events
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
        assert_eq!((heard, outcome), (1000, TurnOutcome::Completed));
        let peak = sandbox.memory_kib("VmHWM");
        assert!(peak < 24 * 1024, "{peak} KiB");
    }

    fn a_long_output_can_be_had_whole_until_its_event_is_stored(&self) {
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
        assert_eq!(sandbox.guest().ask(ask).unwrap_err().code, FaultCode::NotOwner);
        assert_eq!(owner.ask(ask), Ok(Reply::Done));
        owner.until(|owner| owner.ended.contains(&77).then_some(()));
        let whole = String::from_utf8(owner.data.remove(&77).unwrap()).unwrap();
        assert_eq!(whole.len() as u64, blob.bytes);
        assert_eq!(whole.trim_end(), format!("begin\n{}\nend", "x".repeat(199_990)));
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        owner.say(ToSupervisor::EventsStored { upto });
        assert_eq!(owner.ask(ask).unwrap_err().code, FaultCode::NotFound);
        self.goes_on(&mut owner);
    }

    fn a_prompt_is_carried_out_once_although_it_is_sent_twice(&self) {
        let (_sandbox, mut owner) = self.start();
        let order = order(self.hello);
        for _ in 0..2 {
            let prompt = Box::new(order.clone());
            assert_eq!(owner.ask(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
        }
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        let prompt = Box::new(order.clone());
        assert_eq!(owner.ask(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
        owner.prompt(self.tool);
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        assert!(
            !owner.events.iter().any(|event| matches!(event.body, EventBody::TurnStarted { .. }))
        );
    }
}

macro_rules! every_agent {
    ($($rule:ident),* $(,)?) => {
        mod claude {
            $(#[test] fn $rule() { super::CLAUDE.$rule(); })*
        }
        mod scripted {
            $(#[test] fn $rule() { super::SCRIPTED.$rule(); })*
        }
    };
}

every_agent! {
    text_comes_in_pieces,
    a_tool_call_starts_and_ends,
    a_question_reaches_a_person_and_the_answer_the_agent,
    a_stop_while_it_asks_closes_the_question,
    a_stop_while_it_hangs_leaves_nothing,
    a_stop_in_a_shell_loop_leaves_nothing,
    a_crash_fails_its_turn_and_the_conversation_is_resumed,
    a_crash_while_idle_is_told_and_made_good,
    six_crashes_in_a_row_are_enough,
    a_turn_that_ends_well_starts_the_count_of_crashes_anew,
    lines_without_meaning_are_kept_short_and_stop_nothing,
    a_flood_waits_for_its_owner_and_loses_nothing,
    a_long_output_can_be_had_whole_until_its_event_is_stored,
    a_prompt_is_carried_out_once_although_it_is_sent_twice,
}

#[test]
fn an_agent_nobody_knows_fails_the_boot_and_says_which_there_are() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let mut boot = sandbox.boot(BootStart::Fresh, &[]);
    boot.agent.as_mut().unwrap().name = "gpt".to_owned();
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    let failed = owner.event(|body| {
        matches!(
            body,
            EventBody::BootPhase { phase: BootPhase::Agent, status: PhaseStatus::Failed, .. }
        )
    });
    let EventBody::BootPhase { tail, .. } = failed else { unreachable!() };
    assert_eq!(tail.as_deref(), Some("there is no agent `gpt`; there are `claude` and `scripted`"));
}
