//! Agents that a user types: each has a model service, the rules and the MCP servers, whatever the
//! session's own agent is.

use harvest_e2e::Host;
use harvest_proto::{
    SessionId,
    api::{Session, SessionState},
    bridge::Exit,
};
use serde_json::json;

use crate::app_folder::{idle, recording_model};

#[tokio::test]
async fn typed_agents_get_model_rules_and_servers() {
    let (model, requests) = recording_model().await;
    let openai = format!("{model}/v1");
    let env = [
        ("ANTHROPIC_API_KEY", "sk-recorded"),
        ("OPENAI_API_KEY", "sk-recorded"),
        ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &*model),
        ("HARVEST_UPSTREAMS_OPENAI_URL", &*openai),
    ];
    let host = Host::start_with(&env).await;
    host.repository("calc", &[("a.txt", "a\n")]).await;
    for agent in ["claude", "codex"] {
        let body = json!({ "repository": "calc", "agent": agent, "network": "none" });
        let session: Session =
            serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
        host.wait_for(&session.id, SessionState::Idle).await;
        for (typed, path) in [
            ("CLAUDE_CODE_MAX_RETRIES=0 ENABLE_TOOL_SEARCH=false claude -p hi", "/v1/messages"),
            ("codex exec --skip-git-repo-check hi < /dev/null", "/v1/responses"),
        ] {
            let command = format!("cd /workspace/calc && {typed}");
            // The model accepts no key, so the agent fails.
            let (_, output) = host.exec(&session.id, "harvest", &command).await;
            let requests = std::mem::take(&mut *requests.lock().unwrap());
            let request =
                requests.iter().find(|request| request.starts_with(&format!("POST {path}")));
            let request = request.unwrap_or_else(|| panic!("{agent}, {typed}: {output}"));
            assert_eq!(request.matches("Act, do not ask").count(), 1, "{agent}, {typed}");
            assert!(request.contains("create_pull_request"), "{agent}, {typed}: no tools");
        }
    }
}

/// The servers that agents list in their own commands.
async fn listed(host: &Host, session: &SessionId, agent: &str) -> String {
    let command = format!("cd /workspace/calc && {agent} mcp list");
    let (exit, output) = host.exec(session, "harvest", &command).await;
    assert_eq!(exit, Exit::Code(0), "{agent}: {output}");
    output
}

#[tokio::test]
async fn servers_of_repository_are_read_at_each_boot() {
    let host = Host::start().await;
    let session = idle(&host, &[("a.txt", "a\n")]).await;
    let servers = json!({ "mcpServers": { "greeter": { "command": "true" } } });
    let write = format!("echo '{servers}' > /workspace/calc/.mcp.json");
    assert_eq!(host.exec(&session, "harvest", &write).await.0, Exit::Code(0));
    assert!(!listed(&host, &session, "codex").await.contains("greeter"));
    assert_eq!(host.harvest(["pause", &session.to_string()]).code, 0);
    assert_eq!(host.harvest(["resume", &session.to_string()]).code, 0);
    host.wait_for(&session, SessionState::Idle).await;
    for agent in ["codex", "claude"] {
        let listed = listed(&host, &session, agent).await;
        assert!(listed.contains("greeter") && listed.contains("harvest"), "{agent}: {listed}");
    }
}
