//! The warm pool on the real programs: a session takes a waiting sandbox, and a server that is
//! killed anywhere loses none.

use std::{collections::BTreeSet, time::Duration};

use harvest_e2e::{Host, eventually};
use harvest_proto::{
    EventBody, SandboxId,
    api::{Page, PoolSandbox, PoolStatus, SandboxList, Session, SessionState},
    event::{McpState, StartWay, TurnOutcome},
};
use serde_json::json;

use crate::{SAMPLE, completed, secrets::set_secret};

const PLANTED: &str = "pool-planted-1d5c7f20be";

async fn pooled() -> Host {
    let host = Host::start_with(&[("HARVEST_POOL", "1"), ("HARVEST_LIMITS_SANDBOXES", "50")]).await;
    host.repository("calc", SAMPLE).await;
    host
}

async fn pool(host: &Host) -> Vec<PoolSandbox> {
    let answer = host.get("/v1/warm").send().await.unwrap();
    answer.json::<Page<PoolSandbox>>().await.unwrap().items
}

/// Waits until a sandbox waits in the pool.
async fn ready(host: &Host) -> SandboxId {
    eventually("the pool to be full", || async {
        match &pool(host).await[..] {
            [one] if one.status == PoolStatus::Ready => Some(one.sandbox_id.clone()),
            _ => None,
        }
    })
    .await
}

async fn way(host: &Host, session: &Session) -> StartWay {
    let mut follower = host.follow(session.id.clone());
    let started = follower
        .until("the sandbox", |body| matches!(body, EventBody::SandboxStarted { .. }))
        .await;
    let EventBody::SandboxStarted { way, .. } = started.body else { unreachable!() };
    way
}

#[tokio::test]
async fn claude_from_the_pool_works_and_remembers() {
    let host = pooled().await;
    let first = host.session("calc", "Begin.", &json!([{ "text": "hello" }])).await;
    host.follow(first.id.clone()).until("turn 1", completed).await;
    assert_eq!(way(&host, &first).await, StartWay::Build);
    let waiting = ready(&host).await;

    // Of a user whose secret is younger than the sandbox, and with another policy.
    set_secret(&host, &["OF_USER", "--user"], PLANTED);
    let script = json!([
        { "bash": "env; cat /proc/*/environ | tr '\\0' '\\n'; cat ~/.gitconfig" },
        { "edit": { "path": "calc.py", "old": "a - b", "new": "a + b" } },
        { "bash": "git commit -qam 'Add' && git push -q && git log -1 --format='by %ae'" },
        { "tool": { "name": "mcp__harvest__search_nodes", "input": { "query": "x" } } },
    ]);
    let second = host.session("calc", "Fix it.", &script).await;
    let mut follower = host.follow(second.id.clone());
    follower.until("turn 1", completed).await;
    assert_eq!(host.show(&second.id).await.sandbox, Some(waiting));
    assert_eq!(way(&host, &second).await, StartWay::Pool);
    let events = host.events(&second.id).await;
    let text = format!("{events:?}");
    assert!(text.contains("by test@example.org"), "{text}");
    assert!(!text.contains(PLANTED), "{text}");
    let connected = events.iter().any(|body| {
        matches!(body, EventBody::AgentReady { mcp, .. }
            if mcp.iter().any(|one| one.name == "harvest" && one.state == McpState::Connected))
    });
    assert!(connected, "the agent has the tools: {events:#?}");
    let pushed = events.iter().any(|body| matches!(body, EventBody::Pushed { .. }));
    assert!(pushed, "the door is the session's: {events:#?}");

    host.prompt(&second.id, "Remember?", &json!([{ "history": true }])).await;
    let before = follower.seen.last().map_or(0, |event| event.seq);
    follower.after(before, "turn 2", completed).await;
    assert_eq!(crate::agents::remembered(&follower, before), 1);
    let (_, inside) = host
        .exec(
            &second.id,
            "root",
            &format!("grep -rlI --exclude-dir=proc {PLANTED} / 2>/dev/null; true"),
        )
        .await;
    assert_eq!(inside.trim(), "");
}

#[tokio::test]
async fn requested_sandbox_goes_to_the_next_session() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let body = json!({ "repository": "calc", "agent": "scripted", "model": "scripted" });
    let warming = host.post("/v1/warm", body.clone()).await;
    assert_eq!(warming["status"], "warming");
    let again = host.post("/v1/warm", body).await;
    assert_eq!(again, warming);
    ready(&host).await;
    let session = host.scripted("calc", "Go.", &json!([{ "text": "done" }])).await;
    host.follow(session.id.clone()).until("the turn", completed).await;
    assert_eq!(host.show(&session.id).await.sandbox.unwrap().to_string(), warming["sandbox_id"]);
    assert_eq!(pool(&host).await, []);
    let listed = host.harvest(["show", &session.id.to_string()]);
    assert!(listed.stdout.contains("warm pool"), "{listed:?}");
}

#[tokio::test]
async fn killed_server_leaves_member_or_session() {
    let mut host = pooled().await;
    let first = host.scripted("calc", "Begin.", &json!([{ "text": "hello" }])).await;
    host.follow(first.id.clone()).until("turn 1", completed).await;
    // Fill, claim and replacement, each cut off a little later.
    let mut answered = BTreeSet::new();
    for round in 0..8u64 {
        ready(&host).await;
        let script = json!([{ "text": "done" }]);
        let create = host.scripted("calc", "Go.", &script);
        let cut = tokio::time::timeout(Duration::from_millis(round * 20), create).await;
        answered.extend(cut.map(|session| session.id.to_string()));
        host.kill();
        host.up().await;
    }
    let all = host.get("/v1/sessions?limit=50").send().await.unwrap();
    let all = all.json::<Page<Session>>().await.unwrap().items;
    let prompted: Vec<_> =
        all.into_iter().map(|session| session.id).filter(|id| *id != first.id).collect();
    let existing: BTreeSet<String> = prompted.iter().map(ToString::to_string).collect();
    assert!(answered.is_subset(&existing), "{answered:?} {existing:?}");
    assert!(!prompted.is_empty());
    for session in &prompted {
        let mut follower = host.follow(session.clone());
        let ended = follower.until("the turn", crate::turn_ended).await;
        assert!(
            matches!(ended.body, EventBody::TurnEnded { outcome: TurnOutcome::Completed, .. }),
            "{ended:?}"
        );
        host.wait_for(session, SessionState::Idle).await;
        let turns = follower.seen.iter().filter(|event| crate::turn_ended(&event.body)).count();
        assert_eq!(turns, 1);
    }
    ready(&host).await;
    eventually("each sandbox to have one owner", || async {
        let pool: BTreeSet<SandboxId> =
            pool(&host).await.into_iter().map(|one| one.sandbox_id).collect();
        let mut owned = BTreeSet::new();
        for session in [first.id.clone()].iter().chain(&prompted) {
            owned.extend(host.show(session).await.sandbox);
        }
        assert!(pool.is_disjoint(&owned), "{pool:?} {owned:?}");
        assert_eq!(owned.len(), prompted.len() + 1);
        let all: SandboxList =
            host.get("/v1/sandboxes").send().await.unwrap().json().await.unwrap();
        let existing: BTreeSet<SandboxId> = all.items.into_iter().map(|one| one.id).collect();
        (existing == &pool | &owned).then_some(())
    })
    .await;
}
