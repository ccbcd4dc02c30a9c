//! The tools that change more than the session of their agent.

use futures_util::FutureExt;
use harvest_gateway::ledger::ToolResult;
use serde_json::json;

use super::*;

/// A session whose door is open.
async fn parent(harness: &Harness, sessions: &Sessions) -> SessionId {
    let id = harness.session(sessions, None).await.id;
    until_state(sessions, &id, SessionState::Idle).await;
    removal::eventually("tools", || harness.doors.1.lock().unwrap().contains_key(&id)).await;
    id
}

fn tools(harness: &Harness, id: &SessionId) -> Arc<dyn Tools> {
    Arc::clone(&harness.doors.1.lock().unwrap()[id])
}

async fn spawn(tools: &dyn Tools, key: &str) -> ToolResult {
    let arguments = json!({ "prompt": "Do a part.", "key": key });
    tools.call("spawn_session", arguments).await.unwrap()
}

fn child(result: ToolResult) -> SessionId {
    assert!(!result.failed, "{}", result.text);
    result.structured.unwrap()["session"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn spawned_session_runs_after_the_client_disconnects() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let parent = parent(&harness, &sessions).await;
    let tools = tools(&harness, &parent);
    assert!(spawn(&*tools, "part").now_or_never().is_none(), "still in progress");
    let all = async || sessions.list(None, 10).await.unwrap().items;
    let created = async {
        while all().await.len() < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), created).await.expect("a child is created");
    let created = all().await.into_iter().map(|one| one.id).find(|id| *id != parent).unwrap();
    until_state(&sessions, &created, SessionState::Idle).await;
    assert_eq!(child(spawn(&*tools, "part").await), created);
    assert_eq!(all().await.len(), 2);
}

#[tokio::test]
async fn pull_request_is_recorded_after_the_client_disconnects() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let session = harness.session(&sessions, Some("hold")).await;
    let id = session.id;
    until(&sessions, &id, started).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let commit = "c0ffee".to_owned();
    ledger.log(&id, EventBody::Pushed { repository: demo(), branch: session.branch, commit }).await;
    removal::eventually("tools", || harness.doors.1.lock().unwrap().contains_key(&id)).await;
    let tools = tools(&harness, &id);
    let asked = async {
        while harness.pulls.opened.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    // The client disconnects once the forge has opened it.
    tokio::select! {
        biased;
        () = asked => {}
        _ = tools.call("create_pull_request", json!({ "title": "Mine" })) => {}
    }
    until(&sessions, &id, |event| matches!(event.body, EventBody::PrOpened { .. })).await;
    let pull = sessions.get(&id).await.unwrap().repositories.remove(0).pr.unwrap();
    assert_eq!((pull.number, pull.title.as_str()), (7, "Mine"));
}
