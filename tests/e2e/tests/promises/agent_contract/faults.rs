//! The faults that every agent survives. Each function ends with a prompt that shows that the agent
//! remembers, and adds its row to the table.

use std::{fs, io::Write as _, time::Duration};

use harvest_e2e::{Host, eventually, processes_with, unique};
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, SessionState},
    bridge::Exit,
    event::TurnOutcome,
};
use serde_json::{Value, json};

use super::session::UnderTest;
use crate::faults_inside::{signal, supervisor};

pub(super) async fn prompts(host: &Host, session: &SessionId) -> Vec<Prompt> {
    let listed = host.get(&format!("/v1/sessions/{session}/prompts")).send().await.unwrap();
    serde_json::from_value(listed.json::<Value>().await.unwrap()["items"].clone()).unwrap()
}

pub(super) async fn stop_in_a_silent_model(test: &mut UnderTest) {
    let prompt = test.hang().await;
    test.stop(&prompt).await;
    test.remembers().await;
    test.row("stops while the model is silent", "yes");
}

pub(super) async fn stop_in_a_shell_loop(test: &mut UnderTest) {
    let word = unique();
    let spin = format!("setsid sleep {word} >/dev/null 2>&1 & while :; do sleep 0.1; done");
    let prompt = test.send("Spin.", &json!([{ "bash": spin }])).await;
    eventually("the detached process", || async { processes_with(&word).first().copied() }).await;
    test.stop(&prompt).await;
    assert_eq!(processes_with(&word), [0; 0], "processes of the turn are left");
    test.remembers().await;
    test.row("stops a shell loop with detached processes", "yes");
}

pub(super) async fn overloaded_model(test: &mut UnderTest) {
    let error = json!({ "status": 529, "type": "overloaded_error", "times": 2 });
    let turn = test.completes("Try.", &json!([[{ "error": error }, { "text": "through" }]])).await;
    assert!(turn.text().contains("through"), "{}", turn.text());
    let reported = turn.has(|body| matches!(body, EventBody::Retry { .. }));
    test.remembers().await;
    test.row("retries an overloaded model (529 twice)", "yes");
    test.row("reports retries", if reported { "yes" } else { "no" });
}

pub(super) async fn rejected_key(test: &mut UnderTest) {
    let error = json!({ "status": 401, "type": "authentication_error", "times": 100 });
    let turn = test.run("Try.", &json!([[{ "error": error }, { "text": "no" }]])).await;
    assert_eq!(turn.outcome, TurnOutcome::Failed, "{:?}", turn.events);
    assert!(turn.error.is_some_and(|error| !error.is_empty()));
    test.remembers().await;
    test.row("fails the turn when the key is rejected (401)", "yes");
}

pub(super) async fn dropped_stream(test: &mut UnderTest) {
    let script = json!([[{ "text": "half" }, { "drop": true }, { "text": "whole" }]]);
    let turn = test.completes("Try.", &script).await;
    // Some agents repeat the call, others keep the first half and ask for the rest.
    assert_ne!(turn.text(), "half", "the rest is missing");
    test.remembers().await;
    test.row("completes an answer that was cut off", "yes");
}

pub(super) async fn prompt_while_busy(test: &mut UnderTest) {
    let script = json!([{ "bash": "sleep 1" }, { "text": "first" }]);
    let first = test.send("One.", &script).await;
    let started = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    test.wait("the first turn", started).await;
    let second = test.host.prompt(&test.session, "Two.", &json!([{ "text": "second" }])).await;
    let turn = test.end(&first).await;
    assert!(turn.outcome == TurnOutcome::Completed && turn.text().contains("first"));
    assert!(!turn.text().contains("second"), "{}", turn.text());
    let turn = test.end(&second).await;
    assert!(turn.outcome == TurnOutcome::Completed && turn.text().contains("second"));
    test.remembers().await;
    test.row("keeps a prompt apart that comes during a turn", "yes");
}

pub(super) async fn long_output(test: &mut UnderTest) {
    let write = "head -c 10000000 /dev/zero | tr '\\0' x; echo; echo the end";
    test.completes("Write.", &json!([{ "bash": write }, { "text": "written" }])).await;
    test.remembers().await;
    test.row("survives 10 MB of tool output", "yes");
}

/// The line comes from another process, as that of a program which writes to a foreign output.
pub(super) async fn invalid_line(test: &mut UnderTest) {
    let wait = "until [ -e /tmp/go ]; do sleep 0.1; done";
    let prompt = test.send("Wait.", &json!([{ "bash": wait }, { "text": "on" }])).await;
    let started = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    test.wait("the tool", started).await;
    let stdout = format!("/proc/{}/fd/1", test.process().await);
    let mut stdout = fs::OpenOptions::new().write(true).open(stdout).unwrap();
    stdout.write_all(b"\xff not a line of the protocol\n").unwrap();
    drop(stdout);
    test.wait("the line", |body| matches!(body, EventBody::AgentRaw { .. })).await;
    let (exit, output) = test.host.exec(&test.session, "root", "touch /tmp/go").await;
    assert_eq!(exit, Exit::Code(0), "{output}");
    assert_eq!(test.end(&prompt).await.outcome, TurnOutcome::Completed);
    test.remembers().await;
    test.row("survives an invalid line on its output", "yes");
}

pub(super) async fn killed_agent(test: &mut UnderTest) {
    let prompt = test.hang().await;
    assert!(signal(test.process().await, "-9"));
    let exited = |body: &EventBody| {
        matches!(body, EventBody::AgentExited { exit: Exit::Signal(9), restarts: true, .. })
    };
    test.wait("its exit", exited).await;
    assert_eq!(test.end(&prompt).await.outcome, TurnOutcome::Failed);
    test.remembers().await;
    test.row("remembers after a kill -9 in mid-answer", "yes");
}

pub(super) async fn killed_supervisor(test: &mut UnderTest) {
    let prompt = test.hang().await;
    assert!(signal(supervisor(&test.host, &test.session).await, "-9"));
    assert_eq!(test.end(&prompt).await.outcome, TurnOutcome::Interrupted);
    test.remembers().await;
    test.row("remembers after a kill -9 of the supervisor in mid-answer", "yes");
}

/// The model calls wait for the server. For one agent it is away as long as for a slow update.
pub(super) async fn killed_server(test: &mut UnderTest) {
    let text = json!({ "text": "one two three four five six", "chunks": 6, "delay_ms": 300 });
    let prompt = test.send("Count.", &json!([text])).await;
    test.wait("the first words", |body| matches!(body, EventBody::TextDelta { .. })).await;
    test.host.kill();
    if test.agent.name == "codex" {
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    test.host.up().await;
    let turn = test.end(&prompt).await;
    assert_eq!(turn.outcome, TurnOutcome::Completed, "{:?} {:?}", turn.error, turn.events);
    test.remembers().await;
    test.row("completes a turn during which the server was killed", "yes");
}

pub(super) async fn pause_and_resume(test: &mut UnderTest) {
    let children = processes_with(&test.server);
    let uses_servers = test.rows.contains(&("uses MCP servers of the repository", "yes"));
    assert_eq!(!children.is_empty(), uses_servers, "{children:?}");
    assert_eq!(test.host.harvest(["pause", &test.session.to_string()]).code, 0);
    test.host.wait_for(&test.session, SessionState::Paused).await;
    eventually("the MCP servers to end", || async {
        processes_with(&test.server).is_empty().then_some(())
    })
    .await;
    test.remembers().await;
    test.row("remembers after a pause", "yes");
    test.row(
        "leaves no MCP server when its sandbox ends",
        if uses_servers { "yes" } else { "no servers" },
    );
}

pub(super) async fn fork(test: &mut UnderTest) {
    let fork = test.host.harvest(["fork", &format!("{}@1", test.session), "--json"]);
    let fork: Value = serde_json::from_str(&fork.stdout).unwrap_or_else(|_| panic!("{fork:?}"));
    let fork: SessionId = fork["id"].as_str().unwrap().parse().unwrap();
    test.host.prompt(&fork, "And you?", &json!([{ "history": true }])).await;
    let mut forked = test.host.follow(fork);
    forked.until("the fork's turn", crate::completed).await;
    assert!(forked.text().contains("I remember 1 earlier"), "{}", forked.text());
    test.row("remembers in a fork", "yes");
}

pub(super) async fn restore(test: &mut UnderTest) {
    let restored = test.host.harvest(["restore", &format!("{}@1", test.session)]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert_eq!(test.history().await, 1, "only the first prompt");
    test.row("remembers what belongs to a restored turn", "yes");
}
