//! Forks, turns and diffs.

use harvest_proto::api::ChangeKind;
use harvest_session::DiffRange;

use super::*;

fn fork_of(turn: Option<u32>, count: u32) -> ForkSession {
    ForkSession { turn, count: Some(count), ..ForkSession::default() }
}

#[tokio::test]
async fn forks_get_own_branches_and_prompts() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let source = harness.session(&sessions, Some("write /f one")).await;
    until_state(&sessions, &source.id, SessionState::Idle).await;
    let prompts =
        ["write /f a", "write /f b", "write /f c"].map(|text| text.parse().unwrap()).to_vec();
    let order = ForkSession { turn: Some(1), prompts, ..ForkSession::default() };
    let forks = sessions.fork(&source.id, order, ada()).await.unwrap();
    let branches: std::collections::BTreeSet<_> =
        forks.iter().map(|fork| fork.branch.clone()).collect();
    assert_eq!(branches.len(), 3);
    for (fork, content) in forks.iter().zip(["a", "b", "c"]) {
        until(&sessions, &fork.id, ended).await;
        let file = harness.fake.file(&sandbox(&sessions, &fork.id).await, "/f");
        assert_eq!(file.as_deref(), Some(content.as_bytes()));
        let first = sessions.snapshots(&fork.id).await.unwrap()[0].clone();
        assert_eq!(Some(first.id), sessions.turns(&source.id).await.unwrap()[0].snapshot_id);
    }
    let again = sessions.fork(&forks[0].id, fork_of(Some(0), 1), ada()).await.unwrap().remove(0);
    until_state(&sessions, &again.id, SessionState::Idle).await;
    let file = harness.fake.file(&sandbox(&sessions, &again.id).await, "/f");
    assert_eq!(file.as_deref(), Some(&b"one"[..]), "turn 0 is the fork's start");
}

#[tokio::test]
async fn turn_zero_is_a_fresh_checkout() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let source = harness.session(&sessions, Some("write /f one")).await.id;
    until_state(&sessions, &source, SessionState::Idle).await;
    let fork = sessions.fork(&source, fork_of(Some(0), 1), ada()).await.unwrap().remove(0);
    let again = sessions.fork(&fork.id, fork_of(Some(0), 1), ada()).await.unwrap().remove(0);
    sessions.restore(&source, &RestorePoint::Turn(0)).await.unwrap();
    for id in [&fork.id, &again.id, &source] {
        until_state(&sessions, id, SessionState::Idle).await;
        assert_eq!(harness.fake.file(&sandbox(&sessions, id).await, "/f"), None);
        assert_eq!(sessions.get(id).await.unwrap().snapshot_id, None);
    }
    assert_eq!((fork.forked_turn, fork.turns), (Some(0), 0));
    sessions.restore(&source, &RestorePoint::Turn(1)).await.unwrap();
    until_state(&sessions, &source, SessionState::Idle).await;
    let file = harness.fake.file(&sandbox(&sessions, &source).await, "/f");
    assert_eq!(file.as_deref(), Some(&b"one"[..]), "the turn can still be restored");
}

#[tokio::test]
async fn fork_uses_newest_turn_or_pause_snapshot() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    assert_eq!(
        sessions.fork(&id, fork_of(None, 1), ada()).await.unwrap_err().code(),
        "no_snapshot"
    );
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    until_state(&sessions, &id, SessionState::Idle).await;
    send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    let first = sessions.turns(&id).await.unwrap()[0].snapshot_id.clone().unwrap();
    let fork = sessions.fork(&id, fork_of(None, 1), ada()).await.unwrap().remove(0);
    assert_eq!(fork.snapshot_id, Some(first));
    let paused = sessions.pause(&id).await.unwrap();
    let fork = sessions.fork(&id, fork_of(None, 2), ada()).await.unwrap();
    assert!(fork.iter().all(|fork| fork.snapshot_id.as_ref() == Some(&paused)));
}

#[tokio::test]
async fn forks_are_all_or_nothing() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let before = sessions.list(None, 50).await.unwrap().items.len();
    let prompts = vec!["fine".parse().unwrap()];
    let order = ForkSession { count: Some(2), prompts, ..ForkSession::default() };
    assert_eq!(sessions.fork(&id, order, ada()).await.unwrap_err().code(), "invalid_fork");
    assert_eq!(sessions.list(None, 50).await.unwrap().items.len(), before);
    assert_eq!(
        sessions.fork(&id, fork_of(None, 17), ada()).await.unwrap_err().code(),
        "invalid_fork"
    );
    let newest = sessions.get(&id).await.unwrap().snapshot_id.unwrap();
    sessions.fork(&id, fork_of(None, 16), ada()).await.unwrap();
    assert_eq!(sessions.list(None, 50).await.unwrap().items.len(), before + 16);
    let listed = sessions.snapshots(&id).await.unwrap();
    assert_eq!(listed.last().unwrap().id, newest);
}

#[tokio::test]
async fn disk_diff_does_not_start_session() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /a one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let second = send(&sessions, &id, "write /b two").await;
    until_status(&sessions, &id, &second, PromptStatus::Completed).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.pause(&id).await.unwrap();
    let paths = async |range: DiffRange| {
        let changes = sessions.diff_disk(&id, range).await.unwrap();
        changes.items.into_iter().map(|one| (one.path, one.change)).collect::<Vec<_>>()
    };
    let of = |turn| DiffRange { turn: Some(turn), ..DiffRange::default() };
    assert_eq!(paths(of(1)).await, [("/a".to_owned(), ChangeKind::Added)]);
    assert_eq!(paths(of(2)).await, [("/b".to_owned(), ChangeKind::Added)]);
    let back = DiffRange { from: Some(2), to: Some(1), turn: None };
    assert_eq!(paths(back).await, [("/b".to_owned(), ChangeKind::Removed)]);
    assert_eq!(paths(DiffRange::default()).await.len(), 2);
    assert_eq!(sessions.get(&id).await.unwrap().sandbox, None);
    let wrong = |range| sessions.diff_disk(&id, range);
    assert_eq!(wrong(of(7)).await.unwrap_err().code(), "not_found");
    let both = DiffRange { turn: Some(1), from: Some(1), to: None };
    assert_eq!(wrong(both).await.unwrap_err().code(), "invalid_range");
}

#[tokio::test]
async fn turn_reports_prompt_and_token_usage() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let text = format!("hold {}", "x".repeat(600));
    let id = harness.session(&sessions, Some(&text)).await.id;
    until(&sessions, &id, started).await;
    let call = planned_call();
    ledger.reserve(&id, &call).await.unwrap();
    let used = Usage { input_tokens: 90, output_tokens: 20, ..Usage::default() };
    ledger.settle(&id, &call, Used::Counted(used)).await;
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    until_state(&sessions, &id, SessionState::Idle).await;
    let call = planned_call();
    ledger.reserve(&id, &call).await.unwrap();
    let used = Usage { input_tokens: 1, ..Usage::default() };
    ledger.settle(&id, &call, Used::Counted(used)).await;
    let turn = sessions.turn(&id, 1).await.unwrap();
    assert_eq!(
        (turn.text.as_str(), turn.usage.input_tokens, turn.usage.output_tokens),
        (text.as_str(), 90, 20)
    );
    let listed = sessions.turns(&id).await.unwrap().remove(0);
    assert_eq!((listed.text.len(), listed.usage), (500, turn.usage));
    assert!(matches!(sessions.turn(&id, 2).await, Err(SessionError::NotFound { .. })));
}
