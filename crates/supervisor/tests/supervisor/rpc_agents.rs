//! Agents that speak JSON-RPC: OpenCode by the Agent Client Protocol, and Codex. They are scripts;
//! `contract.rs` has what they share with all agents.

use std::fs;

use harvest_proto::{AgentName, EventBody, bridge::*, event::TurnOutcome};

use crate::harness::*;

fn started(agent: AgentName) -> (Sandbox, Client) {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted_with(&mut owner, agent);
    (sandbox, owner)
}

fn for_each(test: impl Fn(AgentName)) {
    [AgentName::Opencode, AgentName::Codex].into_iter().for_each(test);
}

#[test]
fn ready_agent_reports_its_version() {
    for_each(|agent| {
        let sandbox = Sandbox::start();
        let mut owner = sandbox.owner(1, 0);
        sandbox.boot_with(&mut owner, agent.clone());
        let ready = owner.event(|body| matches!(body, EventBody::AgentReady { .. }));
        let EventBody::AgentReady { version, .. } = ready else { unreachable!() };
        let expected = if agent == AgentName::Codex { "0.166.0" } else { "1.18.33" };
        assert_eq!(version.as_deref(), Some(expected));
    });
}

#[test]
fn running_tool_reports_its_output() {
    for_each(|agent| {
        let (_sandbox, mut owner) = started(agent);
        owner.prompt("use a tool");
        let output = owner.event(|body| {
            assert!(!matches!(body, EventBody::ToolEnded { .. }), "output comes before the end");
            matches!(body, EventBody::ToolOutput { .. })
        });
        assert_eq!(output, EventBody::ToolOutput { call: "t7".into(), text: "ma".into() });
        owner.event(|body| matches!(body, EventBody::ToolEnded { .. }));
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    });
}

#[test]
fn dropped_end_of_a_call_ends_the_turn() {
    let (_sandbox, mut owner) = started(AgentName::Opencode);
    owner.prompt("a huge output");
    let warning = owner.event(|body| matches!(body, EventBody::Warning { .. }));
    assert!(
        matches!(&warning, EventBody::Warning { message } if message.contains("dropped a line")),
        "{warning:?}"
    );
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    owner.prompt("hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn unknown_request_of_an_agent_is_refused() {
    for_each(|agent| {
        let (_sandbox, mut owner) = started(agent);
        owner.prompt("wonder");
        owner.text("refused");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    });
}

#[test]
fn restarted_agent_resumes_without_replayed_events() {
    for_each(|agent| {
        let (sandbox, mut owner) = started(agent.clone());
        owner.prompt("hello");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
        owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
        owner.events.clear();
        owner.prompt("history");
        let said = owner.event(|body| matches!(body, EventBody::TextDelta { .. }));
        let text = "I remember 1 earlier prompts.".to_owned();
        assert_eq!(said, EventBody::TextDelta { text });
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        let starts = fs::read_to_string(sandbox.at("home/starts")).unwrap();
        let again = if agent == AgentName::Codex { "resume" } else { "load" };
        assert_eq!(starts, format!("new\n{again}\n"));
    });
}

#[test]
fn lost_conversation_begins_anew() {
    for_each(|agent| {
        let (sandbox, mut owner) = started(agent);
        owner.prompt("hello");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        for entry in fs::read_dir(sandbox.at("home")).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().contains("/talk-") {
                fs::remove_file(path).unwrap();
            }
        }
        kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
        owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
        owner.prompt("hello");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        let starts = fs::read_to_string(sandbox.at("home/starts")).unwrap();
        assert_eq!(starts.lines().filter(|line| *line == "new").count(), 2, "{starts}");
    });
}

#[test]
fn agent_without_memory_gets_the_history() {
    for_each(|agent| {
        let (_sandbox, mut owner) = started(agent);
        let second = TurnRequest { number: 2, ..turn_request("hello") };
        let prompt = |request: &TurnRequest| {
            let prompt = Box::new(request.clone());
            move |id| ToSupervisor::Prompt { id, prompt }
        };
        let refused = owner.request(prompt(&second)).unwrap_err();
        assert_eq!(refused.code, FaultCode::NeedsHistory);
        let past = PastMessage { from: Speaker::User, text: "fix it".into() };
        let second = TurnRequest { history: Some(vec![past]), ..second };
        assert_eq!(owner.request(prompt(&second)), Ok(Reply::Done));
        let notice = owner.event(|body| matches!(body, EventBody::Warning { .. }));
        let EventBody::Warning { message } = notice else { unreachable!() };
        assert!(message.contains("last 1 messages"), "{message}");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
        let third = TurnRequest { number: 3, ..turn_request("hello") };
        assert_eq!(owner.request(prompt(&third)), Ok(Reply::Done), "it remembers now");
        assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    });
}

#[test]
fn another_agent_takes_over_with_the_history() {
    let (sandbox, mut owner) = started(AgentName::Opencode);
    owner.prompt("hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    let boot = sandbox.boot(BootStart::Restore, &[]);
    let launch = AgentLaunch { name: AgentName::Codex, ..boot.agent.unwrap() };
    let request = |text, history| TurnRequest {
        number: 2,
        agent: Some(Box::new(launch.clone())),
        history,
        ..turn_request(text)
    };
    let send = |owner: &mut Client, request: TurnRequest| {
        owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(request) })
    };
    let refused = send(&mut owner, request("hello", None)).unwrap_err();
    assert_eq!(refused.code, FaultCode::NeedsHistory);
    let past = PastMessage { from: Speaker::User, text: "fix it".into() };
    assert_eq!(send(&mut owner, request("hello", Some(vec![past]))), Ok(Reply::Done));
    let ready = owner.event(|body| matches!(body, EventBody::AgentReady { .. }));
    assert!(
        matches!(ready, EventBody::AgentReady { version: Some(codex), .. } if codex == "0.166.0")
    );
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(send(&mut owner, request("history", None)), Ok(Reply::Done), "it remembers now");
    owner.text("I remember 1 earlier prompts.");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn crashed_takeover_needs_the_history_again() {
    let (sandbox, mut owner) = started(AgentName::Codex);
    owner.prompt("hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    let boot = sandbox.boot(BootStart::Restore, &[]).agent.unwrap();
    let send = |owner: &mut Client, agent, text, history| {
        let launch = AgentLaunch { name: agent, ..boot.clone() };
        let agent = Some(Box::new(launch));
        let prompt = TurnRequest { number: 2, agent, history, ..turn_request(text) };
        owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(prompt) })
    };
    let past = || Some(vec![PastMessage { from: Speaker::User, text: "fix it".into() }]);
    assert_eq!(send(&mut owner, AgentName::Opencode, "hello", past()), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    // It resumes its own conversation, which lacks the turn of the other agent.
    assert_eq!(send(&mut owner, AgentName::Codex, "crash now", past()), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
    owner.event(|body| matches!(body, EventBody::AgentReady { .. }));
    let refused = send(&mut owner, AgentName::Codex, "hello", None).unwrap_err();
    assert_eq!(refused.code, FaultCode::NeedsHistory);
    assert_eq!(send(&mut owner, AgentName::Codex, "hello", past()), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
}
