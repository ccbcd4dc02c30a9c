//! Prompts that arrive while their agent restarts.

use std::fs;

use harvest_proto::{EventBody, bridge::*, event::TurnOutcome};

use crate::harness::*;

/// A sandbox after one turn, whose agent was killed and waits in its restart for `home/hold`.
fn restarting() -> (Sandbox, Client) {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    fs::write(sandbox.at("home/hold"), "").unwrap();
    kill(&fs::read_to_string(sandbox.at("home/pid")).unwrap());
    owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
    (sandbox, owner)
}

fn second_prompt(owner: &mut Client, history: Option<Vec<PastMessage>>) -> Result<Reply, Fault> {
    let request = TurnRequest { number: 2, history, ..turn_request("say hello") };
    owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(request) })
}

/// Lets the agent start; whether the history was put in front of the prompt.
fn history_was_used(sandbox: &Sandbox, owner: &mut Client) -> bool {
    fs::remove_file(sandbox.at("home/hold")).unwrap();
    let (mut used, mut ended) = (false, false);
    while !ended {
        match owner.event(|_| true) {
            EventBody::Warning { message } => used |= message.contains("put in front"),
            EventBody::TurnEnded { outcome, .. } => {
                assert_eq!(outcome, TurnOutcome::Completed);
                ended = true;
            }
            _ => {}
        }
    }
    used
}

fn past() -> Option<Vec<PastMessage>> {
    Some(vec![PastMessage { from: Speaker::User, text: "fix it".into() }])
}

#[test]
fn prompt_during_failed_resume_brings_the_history() {
    let (sandbox, mut owner) = restarting();
    for entry in fs::read_dir(sandbox.at("home")).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains("/talk-") {
            fs::remove_file(path).unwrap();
        }
    }
    assert_eq!(second_prompt(&mut owner, None).unwrap_err().code, FaultCode::NeedsHistory);
    assert_eq!(second_prompt(&mut owner, past()), Ok(Reply::Done));
    assert!(history_was_used(&sandbox, &mut owner));
    assert_eq!(fs::read_to_string(sandbox.at("home/starts")).unwrap(), "new\nresume\nnew\n");
}

#[test]
fn resumed_agent_is_not_given_the_history() {
    let (sandbox, mut owner) = restarting();
    assert_eq!(second_prompt(&mut owner, past()), Ok(Reply::Done));
    assert!(!history_was_used(&sandbox, &mut owner));
    assert_eq!(fs::read_to_string(sandbox.at("home/starts")).unwrap(), "new\nresume\n");
}
