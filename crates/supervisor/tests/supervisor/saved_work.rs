//! Work that an agent left behind at the end of a turn, when a pull request is wanted.

use std::fs;

use harvest_proto::{
    AgentName, EventBody, TurnId,
    bridge::*,
    event::{SavedWork, TurnOutcome},
};

use crate::{git_requests::shop, harness::*, syncs::open_origin};

fn booted() -> (Sandbox, Client) {
    let sandbox = Sandbox::start();
    let mut client = sandbox.owner(1, 0);
    sandbox.booted_with(&mut client, AgentName::Scripted);
    open_origin(&sandbox);
    (sandbox, client)
}

/// Sends a prompt of Grace whose turn runs this command.
fn prompt(sandbox: &Sandbox, client: &mut Client, command: &str) -> TurnId {
    let script = serde_json::json!([{ "bash": command }]);
    let mut request = turn_request(&format!("script: {script}"));
    request.author = Author { name: "Grace".into(), email: "grace@example.org".into() };
    request.save_work = sandbox.boot(BootStart::Fresh, &[]).repositories;
    let turn = request.turn.clone();
    let prompt = Box::new(request);
    assert_eq!(client.request(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
    turn
}

/// What was saved before the end of the turn.
fn saved(client: &mut Client) -> (Option<SavedWork>, TurnOutcome) {
    let mut found = None;
    loop {
        let wanted = |body: &EventBody| {
            matches!(body, EventBody::WorkSaved(_) | EventBody::TurnEnded { .. })
        };
        match client.event(wanted) {
            EventBody::WorkSaved(saved) => found = Some(saved),
            EventBody::TurnEnded { outcome, .. } => return (found, outcome),
            _ => unreachable!(),
        }
    }
}

fn pushed(sandbox: &Sandbox) -> String {
    git(&sandbox.at("origin.git"), &["log", "--format=%an <%ae>: %s", "main..harvest/work"])
}

#[test]
fn forgotten_work_is_pushed_as_author_of_prompt() {
    let (sandbox, mut client) = booted();
    let work = "echo a > a && echo b > b && git add a && truncate -s 9M dump && echo c >> README";
    prompt(&sandbox, &mut client, work);
    let (work, outcome) = saved(&mut client);
    let work = work.unwrap();
    assert_eq!((outcome, work.error), (TurnOutcome::Completed, None));
    assert_eq!((work.work.files, work.work.left_out), (3, vec!["dump".to_owned()]));
    assert_eq!(work.work.snapshot, work.pushed);
    let author = "Grace (Harvest) <grace@example.org>";
    assert_eq!(pushed(&sandbox), format!("{author}: wip: uncommitted work of turn 1"));
    // What the agent does itself needs no help.
    let own = "rm dump && echo d > d && git add d && git commit -q -m Own && git push -q 2>&1";
    prompt(&sandbox, &mut client, own);
    assert_eq!(saved(&mut client), (None, TurnOutcome::Completed));
    prompt(&sandbox, &mut client, "git commit -q --allow-empty -m Unpushed");
    let work = saved(&mut client).0.unwrap();
    assert_eq!((work.work.snapshot, work.work.files), (None, 0));
    assert!(work.pushed.is_some());
    assert!(pushed(&sandbox).starts_with(&format!("{author}: Unpushed\n{author}: Own\n")));
}

#[test]
fn turn_without_work_pushes_nothing() {
    let (sandbox, mut client) = booted();
    prompt(&sandbox, &mut client, "cat README");
    assert_eq!(saved(&mut client), (None, TurnOutcome::Completed));
    let branches = git(&sandbox.at("origin.git"), &["branch", "--format=%(refname:short)"]);
    assert_eq!(branches, "main");
}

#[test]
fn stopped_and_failed_turns_push_nothing() {
    let (sandbox, mut client) = booted();
    let turn = prompt(&sandbox, &mut client, "echo a > a; touch ~/began; sleep 1000");
    wait_until("the turn works", || sandbox.at("home/began").exists());
    client.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(saved(&mut client), (None, TurnOutcome::Stopped));
    let mut request = turn_request(r#"script: [{"bash": "echo b > b"}, {"crash": 3}]"#);
    request.number = 2;
    request.history = Some(Vec::new());
    request.save_work = sandbox.boot(BootStart::Fresh, &[]).repositories;
    let prompt = Box::new(request);
    client.request(|id| ToSupervisor::Prompt { id, prompt }).unwrap();
    assert_eq!(saved(&mut client), (None, TurnOutcome::Failed));
    let status = shop(&sandbox, &mut client, "git status --porcelain");
    assert_eq!(status, "?? a\n?? b", "the work stays");
}

#[test]
fn other_branch_and_refused_push_are_named() {
    let (sandbox, mut client) = booted();
    prompt(&sandbox, &mut client, "git checkout -q -b mine && echo a > a");
    let (work, outcome) = saved(&mut client);
    assert!(work.unwrap().error.unwrap().contains("branch mine is checked out"));
    assert_eq!(outcome, TurnOutcome::Completed);
    assert_eq!(shop(&sandbox, &mut client, "git status --porcelain"), "?? a");
    let hook = sandbox.at("origin.git/hooks/pre-receive");
    fs::write(&hook, "#!/bin/sh\necho closed >&2\nexit 1\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&hook, executable).unwrap();
    prompt(&sandbox, &mut client, "git checkout -q harvest/work");
    let (work, outcome) = saved(&mut client);
    let work = work.unwrap();
    assert!(work.error.unwrap().contains("closed"));
    assert_eq!((work.work.files, work.pushed, outcome), (1, None, TurnOutcome::Completed));
    fs::remove_file(&hook).unwrap();
    prompt(&sandbox, &mut client, "true");
    let work = saved(&mut client).0.unwrap();
    assert_eq!((work.work.files, work.error), (0, None), "the next turn pushes it");
    assert!(work.pushed.is_some());
}

#[test]
fn rewritten_branch_is_pushed_in_place() {
    let (sandbox, mut client) = booted();
    prompt(&sandbox, &mut client, "echo a > a");
    assert!(saved(&mut client).0.unwrap().pushed.is_some());
    sandbox.commit("theirs", "theirs\n");
    prompt(&sandbox, &mut client, "git fetch -q && git rebase -q origin/main");
    let work = saved(&mut client).0.unwrap();
    assert_eq!((work.error, work.pushed.is_some()), (None, true));
    // As after a restore: what the checkout knows of the remote is old. Commits of others are the
    // gateway's to protect.
    let restored = "git reset -q --hard HEAD~1 && git update-ref refs/remotes/origin/harvest/work \
                    HEAD && git commit -q --allow-empty -m Other";
    prompt(&sandbox, &mut client, restored);
    let work = saved(&mut client).0.unwrap();
    assert_eq!((work.error, work.pushed.is_some()), (None, true));
    assert!(pushed(&sandbox).contains("Other"));
}
