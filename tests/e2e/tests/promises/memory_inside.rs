//! The memory of a repository inside a sandbox: its first entities, and the file of the stock
//! memory server.

use harvest_e2e::Host;
use harvest_proto::{
    SessionId,
    api::{Session, SessionState},
    bridge::Exit,
};
use serde_json::json;

const SEED: &str = r#"{
    "entities": [{ "name": "billing", "entityType": "module", "observations": ["rounds down"] }],
    "relations": [{ "from": "billing", "to": "local/calc", "relationType": "is part of" }]
}"#;

async fn idle(host: &Host, repository: &str) -> SessionId {
    let body = json!({ "repository": repository, "agent": "scripted", "network": "none" });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    host.wait_for(&session.id, SessionState::Idle).await;
    session.id
}

/// The file that the variable names.
async fn file(host: &Host, session: &SessionId) -> String {
    let (exit, text) = host.exec(session, "harvest", "cat $MEMORY_FILE_PATH").await;
    assert_eq!(exit, Exit::Code(0), "{text}");
    text
}

#[tokio::test]
async fn memory_is_seeded_once_and_copied_inside() {
    let host = Host::start().await;
    host.repository("calc", &[("a.txt", "a\n"), (".harvest/memory-seed.json", SEED)]).await;
    let export = || host.harvest(["memory", "export", "calc"]).stdout;
    let session = idle(&host, "calc").await;
    let first = export();
    assert!(first.contains("rounds down") && first.contains("\"local/calc\""), "{first}");
    assert_eq!(file(&host, &session).await, first);
    let (_, path) = host.exec(&session, "root", "echo $MEMORY_FILE_PATH").await;
    assert_eq!(path.trim(), "/home/harvest/.mcp-memory/memory.jsonl");

    // What was removed does not come back.
    assert_eq!(host.harvest(["memory", "clear", "calc", "--yes"]).code, 0);
    let later = idle(&host, "calc").await;
    assert_eq!((export(), file(&host, &later).await), (String::new(), String::new()));

    // A restored disk gets today's memory, not its own.
    assert_eq!(host.harvest(["pause", &session.to_string()]).code, 0);
    assert_eq!(host.harvest(["resume", &session.to_string()]).code, 0);
    host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(file(&host, &session).await, "");
}
