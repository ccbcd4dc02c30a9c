//! Agents of the configuration: the example agents of the SDKs of the Agent Client Protocol, which
//! `.ci/acp-peers` installs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use harvest_proto::{
    EventBody,
    bridge::*,
    event::{BootPhase, PhaseStatus, ToolKind, TurnOutcome},
};

use crate::harness::*;

fn peers() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.ci/acp-peers");
    let output = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "cannot install the SDKs");
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

fn launch(sandbox: &Sandbox, command: &[&str]) -> (Boot, AgentLaunch) {
    let boot = sandbox.boot(BootStart::Fresh, &[]);
    let command = command.iter().map(|part| (*part).to_owned()).collect();
    let env = [("OWN".to_owned(), "set".to_owned())].into();
    let launch = AgentLaunch {
        name: "own".parse().unwrap(),
        program: Some(AgentProgram { command, env }),
        ..boot.agent.clone().unwrap()
    };
    (boot, launch)
}

fn boot(sandbox: &Sandbox, command: &[&str]) -> Client {
    let mut owner = sandbox.owner(1, 0);
    let (boot, launch) = launch(sandbox, command);
    let boot = Box::new(Boot { agent: Some(launch), ..boot });
    assert_eq!(owner.request(|id| ToSupervisor::Boot { id, boot }), Ok(Reply::Done));
    owner
}

/// Starts an example: a program of the peers and its script.
fn example(program: &str, script: &str) -> (Sandbox, Client) {
    let (sandbox, peers) = (Sandbox::start(), peers());
    let path = |name: &str| peers.join(name).display().to_string();
    let keep_pid = "echo $$ > $HOME/pid; exec \"$0\" \"$@\"";
    let mut owner = boot(&sandbox, &["sh", "-c", keep_pid, &path(program), &path(script)]);
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    (sandbox, owner)
}

/// All text until the end of the turn.
fn said(owner: &mut Client) -> String {
    let mut text = String::new();
    loop {
        match owner.event(|_| true) {
            EventBody::TextDelta { text: more } => text += &more,
            EventBody::TurnEnded { outcome, error, .. } => {
                assert_eq!(outcome, TurnOutcome::Completed, "{error:?}");
                return text;
            }
            _ => {}
        }
    }
}

#[test]
fn python_example_gets_rules_with_first_prompt() {
    let (_sandbox, mut owner) = example("venv/bin/python", "agent.py");
    // The example repeats each block of the prompt.
    owner.prompt("first task");
    let first = said(&mut owner);
    assert!(first.starts_with("Client sent:") && first.ends_with("first task"), "{first}");
    assert!(first.contains("Finish the work") && first.contains("/workspace/shop"), "{first}");
    owner.prompt("second task");
    assert_eq!(said(&mut owner), "Client sent:second task");
}

#[test]
fn restarted_example_without_load_gets_history() {
    let (sandbox, mut owner) = example("venv/bin/python", "agent.py");
    owner.prompt("first task");
    said(&mut owner);
    kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
    owner.event(|body| matches!(body, EventBody::AgentReady { .. }));
    let second = TurnRequest { number: 2, ..turn_request("second task") };
    let refused = owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(second.clone()) });
    assert_eq!(refused.unwrap_err().code, FaultCode::NeedsHistory);
}

#[test]
fn javascript_example_is_allowed_its_tools() {
    let (_sandbox, mut owner) = example("node", "agent.js");
    owner.prompt("go");
    owner.text("I'll help you");
    for kind in [ToolKind::Read, ToolKind::Edit] {
        let started = owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
        let EventBody::ToolStarted { kind: of, input, .. } = started else { unreachable!() };
        assert_eq!(of, kind);
        assert!(input["path"].as_str().unwrap().starts_with("/project/"), "{input}");
        let ended = owner.event(|body| matches!(body, EventBody::ToolEnded { .. }));
        assert!(matches!(ended, EventBody::ToolEnded { ok: true, .. }), "{ended:?}");
    }
    owner.text("successfully updated the configuration");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn javascript_example_is_cancelled() {
    let (_sandbox, mut owner) = example("node", "agent.js");
    let (_, turn) = owner.prompt("go");
    owner.text("I'll help you");
    assert_eq!(owner.request(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
}

#[test]
fn program_missing_in_image_fails_for_good() {
    let sandbox = Sandbox::start();
    let mut owner = boot(&sandbox, &["no-such-agent", "--acp"]);
    let failed = owner
        .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { phase, tail, failure, .. } = failed else { unreachable!() };
    assert_eq!(phase, BootPhase::Agent);
    assert!(failure.unwrap().permanent, "another start would fail too");
    let tail = tail.unwrap();
    assert!(tail.contains("`no-such-agent`") && tail.contains("`[agents.own]`"), "{tail}");
    assert!(tail.contains("harvest image build"), "{tail}");
}

#[test]
fn missing_working_directory_is_no_missing_program() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    let (folder, elsewhere) = (sandbox.at("workspace/shop"), sandbox.at("elsewhere"));
    fs::rename(&folder, &elsewhere).unwrap();
    kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
    owner.event(|body| matches!(body, EventBody::AgentExited { exit: Exit::Signal(9), .. }));
    let failed = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
    let EventBody::AgentExited { tail, restarts, .. } = failed else { unreachable!() };
    assert!(restarts && tail.contains("working directory"), "{tail}");
    fs::rename(&elsewhere, &folder).unwrap();
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn missing_program_ends_the_turn_at_once() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, launch) = launch(&sandbox, &["no-such-agent"]);
    let request = TurnRequest { agent: Some(Box::new(launch)), ..turn_request("hello") };
    let sent = owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(request) });
    assert_eq!(sent, Ok(Reply::Done));
    let exited = owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
    let EventBody::AgentExited { tail, restarts, .. } = exited else { unreachable!() };
    assert!(!restarts && tail.contains("`[agents.own]`"), "{tail}");
    assert!(tail.contains("`harvest send SESSION -a claude"), "{tail}");
    assert_eq!(owner.turn_ended(), TurnOutcome::Failed);
}
