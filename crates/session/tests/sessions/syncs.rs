//! The verb `sync`, and what its outcome does to the session.

use harvest_proto::{api::PullRequestMode, event::SyncOutcome};
use harvest_providers::fake::SYNC_FILE;

use super::*;

/// An idle session whose syncs end like this.
async fn session(harness: &Harness, sessions: &Sessions, outcome: SyncOutcome) -> SessionId {
    let id = harness.session(sessions, Some(&format!("write {SYNC_FILE} {outcome}"))).await.id;
    until_state(sessions, &id, SessionState::Idle).await;
    id
}

/// Everything that turns have written.
async fn texts(sessions: &Sessions, id: &SessionId) -> String {
    let mut texts = String::new();
    for event in all(sessions, id).await {
        if let EventBody::TextDelta { text } = event.body {
            texts.push_str(&text);
        }
    }
    texts
}

#[tokio::test]
async fn conflict_needs_input_and_agent_is_told() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = session(&harness, &sessions, SyncOutcome::Conflict).await;
    let synced = sessions.sync(&id).await.unwrap();
    assert_eq!(synced[0].outcome, SyncOutcome::Conflict);
    let after = sessions.get(&id).await.unwrap();
    assert_eq!((after.state, after.reason), (SessionState::NeedsInput, StateReason::Conflict));
    send(&sessions, &id, "and now?").await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let told = texts(&sessions, &id).await;
    assert!(told.contains("checkpoint-x-1") && told.contains("and now?"), "{told}");
    send(&sessions, &id, "again").await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let told = texts(&sessions, &id).await;
    assert_eq!(told.matches("checkpoint-x-1").count(), 1, "once");
}

#[tokio::test]
async fn sync_is_refused_while_a_turn_runs() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let refused = sessions.sync(&id).await.unwrap_err();
    assert_eq!(refused.code(), "turn_in_progress");
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.sync(&id).await.unwrap();
    let none = sessions.create(CreateSession::default(), ada()).await.unwrap();
    assert_eq!(sessions.sync(&none.id).await.unwrap_err().code(), "no_repository");
}

#[tokio::test]
async fn sync_resumes_paused_session_and_moves_base() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = session(&harness, &sessions, SyncOutcome::Rebased).await;
    sessions.pause(&id).await.unwrap();
    let synced = sessions.sync(&id).await.unwrap();
    assert_eq!(synced[0].outcome, SyncOutcome::Rebased);
    let record = harness.store.session_get(&id).await.unwrap();
    assert_eq!(record.checkouts[0].base_commit, synced[0].base);
    let after = sessions.get(&id).await.unwrap();
    assert_eq!((after.state, after.reason), (SessionState::Idle, StateReason::Ready));
}

#[tokio::test]
async fn third_equal_failure_is_an_event() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = session(&harness, &sessions, SyncOutcome::Failed).await;
    for _ in 0..3 {
        assert_eq!(sessions.get(&id).await.unwrap().state, SessionState::Idle);
        sessions.sync(&id).await.unwrap();
    }
    let after = sessions.get(&id).await.unwrap();
    assert_eq!((after.state, after.reason), (SessionState::NeedsInput, StateReason::Blocked));
    let events = all(&sessions, &id).await;
    let reports = events.iter().filter(|event| matches!(event.body, EventBody::Blocked { .. }));
    assert_eq!(reports.count(), 1);
    assert_gapless(&events);
}

#[tokio::test]
async fn wish_for_a_pull_request_is_kept() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let repository = Some(demo().to_string());
    for pr_mode in [None, Some(PullRequestMode::None), Some(PullRequestMode::Draft)] {
        let create =
            CreateSession { repository: repository.clone(), pr_mode, ..Default::default() };
        let id = sessions.create(create, ada()).await.unwrap().id;
        assert_eq!(harness.store.session_get(&id).await.unwrap().session.pr_mode, pr_mode);
        let fork = ForkSession { turn: Some(0), count: Some(1), ..ForkSession::default() };
        until_state(&sessions, &id, SessionState::Idle).await;
        let fork = sessions.fork(&id, fork, ada()).await.unwrap().remove(0);
        assert_eq!(harness.store.session_get(&fork.id).await.unwrap().session.pr_mode, pr_mode);
    }
}
