//! Recovery from dying servers, connections and sandboxes.

use super::{failures::sql, *};

#[tokio::test]
async fn sandbox_crash_interrupts_prompt_and_recovers_disk() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    harness.fake.crash(&sandbox(&sessions, &id).await, "oom");
    until_state(&sessions, &id, SessionState::Paused).await;
    let first = sessions.prompts(&id).await.unwrap()[0].clone();
    assert_eq!(first.status, PromptStatus::Interrupted);
    let (recovered, kind) = harness.fake.snapshots_taken()[0].clone();
    assert_eq!(kind, SnapshotKind::Recovered);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert_eq!(harness.fake.created()[1].from, StartFrom::Snapshot(recovered));
    assert_eq!(harness.fake.prompts_run(), [first.id, next]);
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 2);
}

#[tokio::test]
async fn session_of_another_provider_is_left_alone() {
    let mut harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.pause(&id).await.unwrap();
    assert_eq!(sessions.get(&id).await.unwrap().provider, "fake");
    sessions.close().await;
    let own = std::mem::replace(&mut harness.fake, Fake::named("other"));
    let sessions = harness.serve().await;
    assert_eq!(sessions.resume(&id).await.unwrap_err().code(), "other_provider");
    let refused = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "other_provider");
    assert_eq!(sessions.list(None, 10).await.unwrap().items.len(), 1, "no fork was made");
    assert!(sessions.snapshots(&id).await.unwrap().iter().all(|snapshot| !snapshot.gone));
    sessions.close().await;
    harness.fake = own;
    let sessions = harness.serve().await;
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn running_turn_survives_server_restart() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    drop(sessions);
    let sessions = harness.serve().await;
    harness.fake.finish_turn(&sandbox_id);
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sandbox(&sessions, &id).await, sandbox_id, "the sandbox is adopted");
    assert_eq!(sessions.get(&id).await.unwrap().epoch, 1, "a restart is no new epoch");
    assert_eq!(harness.fake.prompts_run().len(), 1, "the prompt ran once");
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 1);
    assert_eq!(events.iter().filter(|event| started(event)).count(), 1);
}

#[tokio::test]
async fn turn_ended_without_server_is_recorded_once() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    sessions.close().await;
    drop(sessions);
    harness.fake.finish_turn(&sandbox_id);
    let sessions = harness.serve().await;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Completed);
    assert_gapless(&all(&sessions, &id).await);
    assert!(sessions.turns(&id).await.unwrap()[0].snapshot_id.is_some());
}

#[tokio::test]
async fn sandbox_died_without_server_is_recovered() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    sessions.close().await;
    drop(sessions);
    harness.fake.crash(&sandbox_id, "power");
    let sessions = harness.serve().await;
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Interrupted);
    assert_eq!(harness.fake.snapshots_taken()[0].1, SnapshotKind::Recovered);
    assert_eq!(harness.fake.prompts_run().len(), 1);
}

#[tokio::test]
async fn unsent_prompt_runs_once_after_restart() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.set_failing(FakeOp::Connect, true);
    let id = harness.session(&sessions, Some("hello")).await.id;
    until(&sessions, &id, |event| matches!(event.body, EventBody::SandboxStarted { .. })).await;
    // The server dies with the prompt on disk and nothing sent.
    drop(sessions);
    assert!(harness.fake.prompts_run().is_empty());
    harness.fake.set_failing(FakeOp::Connect, false);
    let sessions = harness.serve().await;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(harness.fake.prompts_run().len(), 1);
    assert_gapless(&all(&sessions, &id).await);
}

#[tokio::test]
async fn server_with_lost_lease_writes_nothing() {
    let harness = Harness::new().await;
    let old = harness.serve().await;
    let id = harness.session(&old, Some("hold")).await.id;
    until(&old, &id, started).await;
    let new = harness.serve().await;
    let create = CreatePrompt::new("late".parse().unwrap());
    assert!(matches!(old.prompt(&id, create, ada()).await, Err(SessionError::Stopped)));
    harness.fake.finish_turn(&sandbox(&new, &id).await);
    until_state(&new, &id, SessionState::Idle).await;
    assert_gapless(&all(&new, &id).await);
    assert_eq!(harness.fake.prompts_run().len(), 1);
}

#[tokio::test]
async fn reconnect_neither_loses_nor_repeats_events() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    for turn in 2..=6 {
        harness.fake.drop_connections(&sandbox_id);
        harness.fake.finish_turn(&sandbox_id);
        send(&sessions, &id, "hold").await;
        until(
            &sessions,
            &id,
            |event| matches!(event.body, EventBody::TurnStarted { number, .. } if number == turn),
        )
        .await;
    }
    harness.fake.finish_turn(&sandbox_id);
    until_state(&sessions, &id, SessionState::Idle).await;
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 6);
    assert_eq!(harness.fake.prompts_run().len(), 6);
}

#[tokio::test]
async fn damaged_session_blocks_neither_start_nor_deletion() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let bad = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &bad, started).await;
    let sandbox_id = sandbox(&sessions, &bad).await;
    sessions.close().await;
    drop(sessions);
    let damage = format!("UPDATE sessions SET state = 'x', input_tokens = 1e19 WHERE id = '{bad}'");
    sql(&harness, damage).await;
    let sessions = harness.serve().await;
    let good = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &good, SessionState::Idle).await;
    assert_eq!(sessions.list(None, 10).await.unwrap().items.len(), 1);
    assert!(harness.fake.sandboxes().contains(&sandbox_id), "its sandbox is not orphaned");
    sessions.delete(&bad).await.unwrap();
    assert!(!harness.store.session_exists(&bad).await.unwrap());
    assert!(!harness.fake.sandboxes().contains(&sandbox_id), "it is removed with the session");
}

#[tokio::test]
async fn start_reads_only_sessions_at_work() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let rests = harness.session(&sessions, Some("hello")).await.id;
    let works = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &works, started).await;
    until_state(&sessions, &rests, SessionState::Idle).await;
    sessions.pause(&rests).await.unwrap();
    until_state(&sessions, &rests, SessionState::Paused).await;
    let at_work = harness.store.session_at_work().await.unwrap();
    assert_eq!(at_work.into_iter().map(|record| record.session.id).collect::<Vec<_>>(), [works]);
    drop(sessions);
    // A prompt that was stored and not dispatched is work.
    sql(&harness, format!("UPDATE prompts SET status = 'queued' WHERE session = '{rests}'")).await;
    assert_eq!(harness.store.session_at_work().await.unwrap().len(), 2);
}

#[tokio::test]
async fn turn_runs_until_its_sandbox_is_stopped() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    // The host does not stop the sandbox, whose processes run on.
    harness.fake.set_failing(FakeOp::SnapshotAndRemove, true);
    assert_eq!(sessions.terminate(&id).await.unwrap_err().code(), "save_unknown");
    assert!(!all(&sessions, &id).await.iter().any(ended));
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Dispatched);
    harness.fake.set_failing(FakeOp::SnapshotAndRemove, false);
    sessions.resume(&id).await.unwrap();
    let end = until(&sessions, &id, ended).await;
    assert!(
        matches!(
            end.body,
            EventBody::TurnEnded { outcome: harvest_proto::event::TurnOutcome::Stopped, .. }
        ),
        "{end:?}"
    );
}

#[tokio::test]
async fn writes_lost_in_power_cut_are_reported() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    sessions.close().await;
    drop(sessions);
    harness.fake.crash(&sandbox_id, harvest_providers::fake::POWER_CUT);
    let sessions = harness.serve().await;
    until_state(&sessions, &id, SessionState::Paused).await;
    let warned = |event: &Event| matches!(event.body, EventBody::Warning { .. });
    assert_eq!(all(&sessions, &id).await.iter().filter(|event| warned(event)).count(), 1);
    let durable: Vec<bool> =
        sessions.snapshots(&id).await.unwrap().iter().map(|snapshot| snapshot.durable).collect();
    assert_eq!(durable, [true, false]);
    // The next sandbox starts from that snapshot, which is known by then.
    sessions.resume(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(all(&sessions, &id).await.iter().filter(|event| warned(event)).count(), 1);
}

#[tokio::test]
async fn start_from_torn_snapshot_is_reported() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.pause(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Paused).await;
    for snapshot in sessions.snapshots(&id).await.unwrap() {
        harness.fake.tear_snapshot(&snapshot.id);
    }
    let fork = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    sessions.resume(&id).await.unwrap();
    let warned = |event: &Event| matches!(&event.body, EventBody::Warning { message } if message.contains("may lack some"));
    for session in [id, fork] {
        until(&sessions, &session, warned).await;
    }
}
