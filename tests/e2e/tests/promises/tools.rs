//! Harvest's own tools, called by agents inside at the tools door.

use harvest_e2e::Host;
use harvest_proto::{
    EventBody, SessionId, StateReason,
    api::{MemoryGraph, SessionState},
    bridge::Exit,
};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

/// A shell command that calls a tool until the server answers: a call in flight when the server
/// dies is lost, as for any HTTP client. `ARGUMENTS` is JSON, and may use shell variables.
fn call(tool: &str, arguments: &str) -> String {
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}"#
    );
    let body = body.replace('"', "\\\"");
    format!(
        "until curl -sSf -m 60 -H 'content-type: application/json' -d \"{body}\" \
         http://mcp.harvest.internal/mcp; do sleep 0.1; done; echo"
    )
}

/// What agents remembered: the memory without its seed.
fn memory(host: &Host, repository: &str) -> MemoryGraph {
    let shown = host.harvest(["--json", "memory", "show", repository]);
    let mut graph: MemoryGraph =
        serde_json::from_str(&shown.stdout).unwrap_or_else(|_| panic!("{shown:?}"));
    graph.entities.retain(|entity| entity.entity_type != "repository");
    graph
}

#[tokio::test]
async fn claude_remembers_through_the_tools_door() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    host.repository("other", SAMPLE).await;
    let entity = json!({ "name": "calc", "entityType": "module", "observations": ["adds"] });
    let create = json!({ "entities": [entity] });
    let script = json!([
        { "tool": { "name": "mcp__harvest__create_entities", "input": create } },
        { "text": "remembered" },
    ]);
    // The policy of this session is `none`: the tools need no network.
    let first = host.session("calc", "Remember this.", &script).await.id;
    host.follow(first.clone()).until("the first turn", completed).await;
    assert_eq!(json!(memory(&host, "calc").entities), json!([entity]));
    assert_eq!(memory(&host, "other"), MemoryGraph::default());

    // Another session of the repository reads it.
    let script = json!([
        { "tool": { "name": "mcp__harvest__search_nodes", "input": { "query": "ADDS" } } },
        { "text": "found" },
    ]);
    let second = host.session("calc", "What do we know?", &script).await.id;
    let mut follower = host.follow(second);
    let found =
        follower.until("the tool", |body| matches!(body, EventBody::ToolEnded { .. })).await;
    let EventBody::ToolEnded { ok: true, output, .. } = found.body else { panic!("{found:?}") };
    assert!(output.contains("\"entityType\":\"module\""), "{output}");
    follower.until("the second turn", completed).await;
    let refused = host
        .events(&first)
        .await
        .into_iter()
        .any(|body| matches!(body, EventBody::EgressRefused { .. }));
    assert!(!refused, "an agent with its tools asks for no other name");
}

#[tokio::test]
async fn two_sessions_remember_everything_across_server_kills() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let write = |writer: &str| {
        let entity = format!(
            r#"{{"entities":[{{"name":"{writer}$i","entityType":"number","observations":["$i"]}}]}}"#
        );
        let one = call("create_entities", &entity);
        json!([{ "bash": format!("for i in $(seq 100); do {one}; done") }, { "text": "done" }])
    };
    let one = host.scripted("calc", "Count.", &write("a")).await.id;
    let other = host.scripted("calc", "Count.", &write("b")).await.id;
    for least in [20, 60] {
        harvest_e2e::eventually("entities to arrive", || async {
            (memory(&host, "calc").entities.len() >= least).then_some(())
        })
        .await;
        host.kill();
        host.up().await;
    }
    for session in [one, other] {
        host.follow(session).until("its turn", completed).await;
    }
    let graph = memory(&host, "calc");
    assert_eq!(graph.entities.len(), 200);
    assert!(graph.entities.iter().all(|entity| entity.observations.len() == 1));
}

#[tokio::test]
async fn memory_outlives_restores_and_moves_as_a_file() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let create =
        call("create_relations", r#"{"relations":[{"from":"a","to":"b","relationType":"uses"}]}"#);
    let nothing = json!([{ "text": "begun" }]);
    let session = host.scripted("calc", "Begin.", &nothing).await.id;
    host.follow(session.clone()).until("turn 1", completed).await;
    let before = host.show(&session).await.seq;
    host.prompt(&session, "Remember.", &json!([{ "bash": create }])).await;
    result_after(&host, &session, before).await;
    let restored = host.harvest(["restore", &format!("{session}@1")]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert_eq!(memory(&host, "calc").relations.len(), 1);

    let exported = host.harvest(["memory", "export", "calc"]);
    let expected =
        "{\"type\":\"relation\",\"from\":\"a\",\"to\":\"b\",\"relationType\":\"uses\"}\n";
    let (seed, relation) = exported.stdout.split_once('\n').unwrap();
    assert_eq!(relation, expected);
    assert!(seed.contains("local/calc"), "{seed}");
    assert_eq!(host.harvest(["memory", "clear", "calc"]).code, 2, "a script has to confirm");
    assert_eq!(host.harvest(["memory", "clear", "calc", "--yes"]).code, 0);
    let file = host.home().join("memory.jsonl");
    std::fs::write(&file, &exported.stdout).unwrap();
    let imported = host.harvest(["--json", "memory", "import", "calc", file.to_str().unwrap()]);
    let imported: Value = serde_json::from_str(&imported.stdout).unwrap();
    assert_eq!(imported["relations"], json!(memory(&host, "calc").relations));
    assert_eq!(imported["relations"][0]["relationType"], "uses");
}

/// The result of a tool of Harvest that a turn after `seq` called last, by `curl`.
async fn result_after(host: &Host, session: &SessionId, seq: u64) -> Value {
    let mut follower = host.follow(session.clone());
    follower.after(seq, "the turn", completed).await;
    let output = follower.seen.iter().rev().find_map(|event| match &event.body {
        EventBody::ToolEnded { output, .. } => Some(output),
        _ => None,
    });
    let output = output.expect("the turn called a tool");
    let line = output.lines().rfind(|line| line.starts_with('{'));
    let line = line.unwrap_or_else(|| panic!("{output}"));
    let answer: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{output}"));
    answer["result"].clone()
}

#[tokio::test]
async fn blocked_agent_waits_for_a_person() {
    let host = Host::start().await;
    let report = call(
        "report_blocked",
        r#"{"criterion":"publish","error":"403","attempts":["npm publish"],"needed_action":"a token"}"#,
    );
    let session = host
        .bare(
            "Publish.",
            &json!([{ "bash": format!("{report}; {report}") }, { "text": "blocked" }]),
        )
        .await
        .id;
    let result = result_after(&host, &session, 0).await;
    assert_eq!(result["isError"], true, "the second report of a turn is refused: {result}");
    let shown = host.wait_for(&session, SessionState::NeedsInput).await;
    assert_eq!(shown.reason, StateReason::Blocked);
    let events = host.events(&session).await;
    let needed: Vec<&str> = events
        .iter()
        .filter_map(|body| match body {
            EventBody::Blocked { needed_action, .. } => Some(needed_action.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(needed, ["a token"]);
    host.prompt(&session, "Here it is.", &json!([{ "text": "thanks" }])).await;
    host.wait_for(&session, SessionState::Idle).await;
}

#[tokio::test]
async fn pull_request_keeps_the_words_of_the_agent() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let create = call(
        "create_pull_request",
        r#"{"title":"Add, not subtract","body":"The sign was wrong."}"#,
    );
    let script = json!([
        { "bash": format!("sed -i 's/a - b/a + b/' calc.py && git commit -qam Fix && git push -q && {create}") },
        { "bash": "echo more > more && git add more && git commit -qm More && git push -q" },
        { "text": "done" },
    ]);
    let session = host.scripted("calc", "Fix it.", &script).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    let opened =
        follower.seen.iter().filter(|event| matches!(event.body, EventBody::PrOpened { .. }));
    assert_eq!(opened.count(), 2, "at the call, and with the second commit");
    let shown = host.show(&session).await;
    let pull = shown.repositories[0].pr.clone().unwrap();
    assert_eq!((pull.number, pull.title.as_str()), (1, "Add, not subtract"));
    assert!(
        pull.body.starts_with("The sign was wrong.\n\n<!-- harvest:begin -->\n- session: "),
        "{}",
        pull.body
    );
    assert!(pull.body.contains(&pull.commit), "{}", pull.body);
}

#[tokio::test]
async fn tests_run_by_tool_end_with_the_turn() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let run = call("run_tests", "{}");
    let fix = format!("sed -i 's/a - b/a + b/' calc.py; {run}");
    let session = host.scripted("calc", "Test.", &json!([{ "bash": fix }])).await.id;
    let result = result_after(&host, &session, 0).await;
    let found = &result["structuredContent"];
    assert_eq!((&found["passed"], &found["exit"]["value"]), (&json!(true), &json!(0)), "{found}");
    assert_eq!(found["command"], "sh .harvest/check.sh");

    let endless = "printf 'echo $$ > /tmp/pid; exec sleep 98765' > .harvest/check.sh";
    let started = "until [ -s /tmp/pid ]; do sleep 0.1; done; echo running; sleep 1000";
    let script = json!([{ "bash": format!("{endless}; ({run}) & {started}") }]);
    host.prompt(&session, "Hang.", &script).await;
    harvest_e2e::eventually("the tests to run", || async {
        let (exit, _) = host.exec(&session, "harvest", "test -s /tmp/pid").await;
        (exit == Exit::Code(0)).then_some(())
    })
    .await;
    host.post(&format!("/v1/sessions/{session}/stop"), json!({})).await;
    host.wait_for(&session, SessionState::Idle).await;
    let (exit, _) = host.exec(&session, "harvest", "kill -0 $(cat /tmp/pid)").await;
    assert_ne!(exit, Exit::Code(0), "the tests still run");
}

#[tokio::test]
async fn spawned_session_is_created_once_per_key() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    host.repository("other", SAMPLE).await;
    let spawn =
        call("spawn_session", r#"{"prompt":"Do a part.","key":"part 1","repository":"other"}"#);
    let session = host
        .scripted("calc", "Split it.", &json!([{ "bash": format!("{spawn}; {spawn}") }]))
        .await
        .id;
    let result = result_after(&host, &session, 0).await;
    let child = &result["structuredContent"];
    assert_eq!(child["repositories"], json!(["local/other"]));
    let all = host.harvest(["--json", "ls", "--all"]);
    let all: Vec<Value> = serde_json::from_str(&all.stdout).unwrap();
    assert_eq!(all.len(), 2, "two calls with one key create one session");
    let id: SessionId = child["session"].as_str().unwrap().parse().unwrap();
    host.follow(id.clone()).until("the child's turn", completed).await;
    assert_eq!(host.show(&id).await.network, host.show(&session).await.network);

    let status = call("session_status", &format!(r#"{{"session":"{id}"}}"#));
    let before = host.show(&session).await.seq;
    host.prompt(&session, "How is it?", &json!([{ "bash": status }])).await;
    let told = result_after(&host, &session, before).await;
    assert_eq!(told["structuredContent"]["session"], json!(id));
}
