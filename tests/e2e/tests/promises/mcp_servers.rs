//! MCP servers behind the gateway, used by every real agent: Harvest's own tools, and a server to
//! which the gateway adds a key.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use harvest_e2e::{Follower, Host};
use harvest_proto::{EventBody, api::SessionState, bridge::Exit};
use serde_json::{Value, json};

use crate::{SAMPLE, app_folder::idle, completed};

const AGENTS: [&str; 3] = ["claude", "opencode", "codex"];
const KEY: &str = "ghp-planted-2c4b90d1";

/// A server of the official SDK that accepts one token. Dropping it ends it.
struct Remote {
    program: Child,
    url: String,
}

impl Remote {
    fn start(token: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let sdks = Command::new(root.join(".ci/model-sdks")).stderr(Stdio::inherit()).output();
        let sdks = String::from_utf8(sdks.unwrap().stdout).unwrap();
        let mut python = Command::new(Path::new(sdks.trim()).join("venv/bin/python"));
        let server = root.join("crates/gateway/tests/sdks/mcp_server.py");
        let mut program = python.arg(server).arg(token).stdout(Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        BufReader::new(program.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
        Self { program, url: format!("http://127.0.0.1:{}/mcp", port.trim()) }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// Steps that call these tools of a server.
fn steps(server: &str, calls: &[(&str, Value)]) -> Vec<Value> {
    let step = |(tool, input): &(&str, Value)| json!({ "tool": { "name": format!("mcp__{server}__{tool}"), "input": input } });
    calls.iter().map(step).collect()
}

/// The outputs of the tools that a turn called, in order; all of them succeeded.
fn outputs(agent: &str, follower: &Follower<'_>) -> Vec<String> {
    let ended = follower.seen.iter().filter_map(|event| match &event.body {
        EventBody::ToolEnded { ok, output, .. } => Some((*ok, output.clone())),
        _ => None,
    });
    ended
        .map(|(ok, output)| {
            assert!(ok, "{agent}: {output}");
            output
        })
        .collect()
}

#[tokio::test]
async fn every_agent_uses_a_server_without_its_key() {
    let remote = tokio::task::spawn_blocking(|| Remote::start(KEY)).await.unwrap();
    let env =
        [("GITHUB_TOKEN", KEY), ("HARVEST_MCP_GITHUB_URL", &*remote.url), ("HARVEST_LOG", "trace")];
    let host = Host::start_with(&env).await;
    host.repository("calc", SAMPLE).await;
    let calls = [("greet", json!({ "name": "Ada" })), ("leak", json!({}))];
    let mut script = steps("github", &calls);
    script.push(json!({ "text": "done" }));
    for agent in AGENTS {
        let session = host.session_of(agent, "calc", "Greet.", &json!(script)).await.id;
        let mut follower = host.follow(session.clone());
        follower.until("the turn", completed).await;
        let outputs = outputs(agent, &follower);
        assert!(outputs[0].contains("hello Ada"), "{agent}: {outputs:?}");
        assert!(outputs[1].contains("the token is ***"), "{agent}: {outputs:?}");
        let look = format!(
            "grep -rlI --exclude-dir=proc {KEY} / 2>/dev/null; cat /proc/*/environ 2>/dev/null | grep -c {KEY}"
        );
        assert_eq!(host.exec(&session, "root", &look).await.1.trim(), "0", "{agent}");
        assert!(!format!("{:?}", host.events(&session).await).contains(KEY), "{agent}");
    }
    // Logs, database, layers and snapshots on the host.
    let found = Command::new("grep").args(["-rl", KEY]).arg(host.home()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
    let doctor = host.harvest(["doctor"]).stdout;
    assert!(
        doctor.contains("for agents: github; without a key: gemini (GEMINI_API_KEY)"),
        "{doctor}"
    );
}

#[tokio::test]
async fn server_without_a_key_is_not_offered() {
    let host = Host::start().await;
    let session = idle(&host, &[("a.txt", "a\n")]).await;
    let (exit, servers) = host.exec(&session, "harvest", "cat /app/mcp.json").await;
    assert_eq!(exit, Exit::Code(0));
    assert!(servers.contains("harvest") && !servers.contains("github"), "{servers}");
    let asked = "curl -s -o /dev/null -w '%{http_code}' http://mcp.harvest.internal/github";
    assert_eq!(host.exec(&session, "harvest", asked).await.1.trim(), "404");
}

/// Every tool of Harvest with arguments, and what its output contains.
fn every_tool() -> [(&'static str, Value, &'static str); 15] {
    let (entity, other) = (
        json!({ "name": "api", "entityType": "service", "observations": ["fast"] }),
        json!({ "name": "db", "entityType": "store", "observations": [] }),
    );
    let relation = json!({ "from": "api", "to": "db", "relationType": "uses" });
    let about = |key: &str| json!([{ "entityName": "db", key: ["big"] }]);
    [
        ("create_entities", json!({ "entities": [entity, other] }), "fast"),
        ("create_relations", json!({ "relations": [relation] }), "uses"),
        ("add_observations", json!({ "observations": about("contents") }), "big"),
        ("search_nodes", json!({ "query": "FAST" }), "service"),
        ("open_nodes", json!({ "names": ["db"] }), "big"),
        ("delete_observations", json!({ "deletions": about("observations") }), "deleted"),
        ("delete_relations", json!({ "relations": [relation] }), "deleted"),
        ("delete_entities", json!({ "entityNames": ["db"] }), "deleted"),
        ("read_graph", json!({}), "api"),
        ("run_tests", json!({}), "passed"),
        ("upload_artifact", json!({ "path": "calc.py" }), "calc.py"),
        ("session_status", json!({}), "local/calc"),
        ("spawn_session", json!({ "prompt": "Do a part.", "key": "part" }), "ses_"),
        ("create_pull_request", json!({ "title": "Add, not subtract" }), "Add, not subtract"),
        (
            "report_blocked",
            json!({ "criterion": "a", "error": "b", "attempts": ["c"], "needed_action": "d" }),
            "",
        ),
    ]
}

#[tokio::test]
async fn every_agent_calls_every_tool() {
    let host = Host::start().await;
    for agent in AGENTS {
        // Each agent begins with an empty memory.
        let repository = format!("calc-{agent}");
        host.repository(&repository, SAMPLE).await;
        let tools = every_tool();
        let calls: Vec<_> = tools.iter().map(|(name, input, _)| (*name, input.clone())).collect();
        let fix = "sed -i 's/a - b/a + b/' calc.py && git commit -qam Fix && git push -q";
        let mut script = vec![json!({ "bash": fix })];
        script.extend(steps("harvest", &calls));
        script.push(json!({ "text": "done" }));
        let session = host.session_of(agent, &repository, "Use them.", &json!(script)).await.id;
        let mut follower = host.follow(session.clone());
        follower.until("the turn", completed).await;
        let outputs = outputs(agent, &follower);
        assert_eq!(outputs.len(), tools.len() + 1, "{agent}: {outputs:?}");
        for ((name, _, part), output) in tools.iter().zip(&outputs[1..]) {
            assert!(
                output.contains(&part.replace("local/calc", &repository)),
                "{agent} {name}: {output}"
            );
        }
        host.wait_for(&session, SessionState::NeedsInput).await;
        let list = r#"curl -s -H 'content-type: application/json' -d '{"jsonrpc":"2.0","id":1,"method":"tools/list"}' http://mcp.harvest.internal/mcp"#;
        let listed: Value =
            serde_json::from_str(&host.exec(&session, "harvest", list).await.1).unwrap();
        let listed: BTreeSet<&str> = listed["result"]["tools"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|tool| tool["name"].as_str())
            .collect();
        assert_eq!(listed, tools.iter().map(|tool| tool.0).collect(), "every tool was called");
    }
}
