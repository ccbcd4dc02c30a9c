//! The start of a session that has no snapshot of it, restored and forked.

use harvest_e2e::Host;
use serde_json::json;

use crate::{SAMPLE, completed};

const HEAD: &str =
    "cd /workspace/calc; git log --format=%s -1; git status --short; ls /home/harvest";

fn printed(host: &Host, arguments: &[&str]) -> String {
    let ran = host.harvest(arguments);
    assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
    ran.stdout
}

#[tokio::test]
async fn session_starts_again_from_its_repository() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([
        { "bash": "cd /workspace/calc; echo one > notes; git add -A; git commit -qm mine; touch ~/mine" },
        { "text": "done" }
    ]);
    let id = host.session("calc", "First.", &script).await.id;
    host.follow(id.clone()).until("turn 1", completed).await;
    let id = id.to_string();
    let head = |session: &str| printed(&host, &["exec", session, "--", "sh", "-c", HEAD]);
    assert!(head(&id).contains("mine"), "the turn committed");
    printed(&host, &["restore", &format!("{id}@0")]);
    let fork = printed(&host, &["fork", &format!("{id}@0")]);
    for session in [id.as_str(), fork.trim()] {
        assert!(!head(session).contains("mine"), "{session} has a fresh checkout");
        assert_eq!(printed(&host, &["diff", session]), "", "which is no change");
    }
    let pin = host.harvest(["snapshot", "pin", &format!("{id}@0")]);
    assert!(pin.code == 1 && pin.stderr.contains("starts from its repositories"), "{pin:?}");
    printed(&host, &["restore", &format!("{id}@1")]);
    assert!(head(&id).contains("mine"), "the turn can still be restored");
}
