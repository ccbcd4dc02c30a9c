//! Freezing, sandbox slots, restoring, terminating and suspending sessions.

use harvest_session::Limits;

use super::*;

pub(super) async fn until_reason(sessions: &Sessions, session: &SessionId, reason: StateReason) {
    let wait = async {
        let (_, mut events) = sessions.follow(session, 0).await.unwrap();
        while sessions.get(session).await.unwrap().reason != reason {
            events.next().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
        panic!("never {reason}: {:#?}", all(sessions, session).await);
    }
}

fn short_idle_freeze() -> Timeouts {
    Timeouts { idle_freeze: Some(Duration::from_millis(50)), ..Timeouts::default() }
}

async fn echo(sessions: &Sessions, session: &SessionId) -> Vec<ExecLine> {
    let request = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
    exec(sessions, session, request).await.unwrap().collect().await
}

#[tokio::test]
async fn command_thaws_sandbox_frozen_elsewhere() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let sandbox = sandbox(&sessions, &id).await;
    let freezing = harness.fake.freeze_control().unwrap();
    for _ in 0..2 {
        freezing.freeze(&sandbox, Duration::from_secs(3600)).await.unwrap();
        let lines = echo(&sessions, &id).await;
        assert!(
            matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
            "{lines:?}"
        );
    }
}

#[tokio::test]
async fn detached_command_counts_as_activity_after_restart() {
    let harness = Harness::with(short_idle_freeze()).await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &id, StateReason::Frozen).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    harness.fake.set_detached(&sandbox_id, 1);
    until_reason(&sessions, &id, StateReason::Ready).await;
    sessions.close().await;
    let sessions = harness.serve().await;
    // Same timeout: had the first session been idle, it would have frozen before the second.
    until(
        &sessions,
        &harness.session(&sessions, Some("hello")).await.id,
        |event| matches!(&event.body, EventBody::StateChanged { reason, .. } if *reason == StateReason::Frozen),
    )
    .await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, StateReason::Ready);
    assert!(!harness.fake.is_frozen(&sandbox_id));
    harness.fake.set_detached(&sandbox_id, 0);
    until_reason(&sessions, &id, StateReason::Frozen).await;
}

#[tokio::test]
async fn idle_session_freezes_and_thaws_on_demand() {
    let harness = Harness::with(short_idle_freeze()).await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /kept yes")).await.id;
    until_reason(&sessions, &id, StateReason::Frozen).await;
    let sandbox_id = sandbox(&sessions, &id).await;
    assert!(harness.fake.is_frozen(&sandbox_id));
    assert_eq!(sessions.get(&id).await.unwrap().state, SessionState::Idle);
    let lines = echo(&sessions, &id).await;
    assert!(
        matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
        "{lines:?}"
    );
    until_reason(&sessions, &id, StateReason::Frozen).await;
    // The fake refuses a prompt while it is frozen.
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert_eq!(sandbox(&sessions, &id).await, sandbox_id, "in the same sandbox");
}

#[tokio::test]
async fn next_server_thaws_frozen_sandbox() {
    let harness = Harness::with(short_idle_freeze()).await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &id, StateReason::Frozen).await;
    sessions.close().await;
    let sessions = harness.serve().await;
    let lines = echo(&sessions, &id).await;
    assert!(
        matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
        "{lines:?}"
    );
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn session_works_when_freezing_fails() {
    let timeouts = Timeouts { idle_pause: Duration::from_millis(200), ..short_idle_freeze() };
    let harness = Harness::with(timeouts).await;
    harness.fake.set_failing(FakeOp::Freeze, true);
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &id, StateReason::Idle).await;
    assert!(!all(&sessions, &id).await.iter().any(|event| {
        matches!(&event.body, EventBody::StateChanged { reason, .. } if *reason == StateReason::Frozen)
    }));
}

async fn limited(sandboxes: usize, sandboxes_per_user: Option<usize>) -> Harness {
    let mut harness = Harness::new().await;
    harness.config.limits =
        Limits { sandboxes, sandboxes_per_user, checks: 1, ..Limits::default() };
    harness
}

#[tokio::test]
async fn queued_sessions_get_slots_in_order() {
    let harness = limited(2, None).await;
    let sessions = harness.serve().await;
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(harness.session(&sessions, Some("hold")).await.id);
    }
    for id in &ids[..2] {
        until(&sessions, id, started).await;
    }
    for (position, id) in ids[2..].iter().enumerate() {
        until_reason(&sessions, id, StateReason::LimitSandboxes).await;
        let waiting = sessions.get(id).await.unwrap();
        assert_eq!(waiting.state, SessionState::Queued);
        assert_eq!(waiting.position, Some(u32::try_from(position + 1).unwrap()));
    }
    let mut running = ids[..2].to_vec();
    for turn in 0..6 {
        // The finished session becomes idle and frees its slot for the next one in the queue.
        let id = running[turn].clone();
        assert!(harness.fake.sandboxes().len() <= 2, "the limit is never exceeded");
        harness.fake.finish_turn(&sandbox(&sessions, &id).await);
        if let Some(next) = ids.get(turn + 2) {
            until(&sessions, next, started).await;
            running.push(next.clone());
        }
    }
    let order: Vec<PromptId> = harness.fake.prompts_run();
    let mut prompts = Vec::new();
    for id in &ids {
        prompts.push(sessions.prompts(id).await.unwrap()[0].id.clone());
    }
    assert_eq!(order, prompts, "first come, first served");
    until_reason(&sessions, &ids[0], StateReason::SlotNeeded).await;
    let last = sessions.get(&ids[5]).await.unwrap();
    assert_eq!(last.position, None);
}

#[tokio::test]
async fn queue_order_survives_restart() {
    let harness = limited(1, None).await;
    let sessions = harness.serve().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(harness.session(&sessions, Some("hold")).await.id);
    }
    until(&sessions, &ids[0], started).await;
    until_reason(&sessions, &ids[3], StateReason::LimitSandboxes).await;
    sessions.close().await;
    let sessions = harness.serve().await;
    for pair in ids.windows(2) {
        harness.fake.finish_turn(&sandbox(&sessions, &pair[0]).await);
        until(&sessions, &pair[1], started).await;
        assert_eq!(harness.fake.sandboxes().len(), 1);
    }
}

#[tokio::test]
async fn user_limit_does_not_affect_other_users() {
    let harness = limited(4, Some(1)).await;
    let sessions = harness.serve().await;
    let first = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &first, started).await;
    let second = harness.session(&sessions, Some("hello")).await;
    until_reason(&sessions, &second.id, StateReason::LimitUser).await;
    let grace = Author { name: "Grace".into(), email: "grace@example.org".into() };
    // The commit author does not matter for the limit.
    let create = CreateSession {
        repository: Some("demo".into()),
        prompt: Some("hello".parse().unwrap()),
        author: Some(ada()),
        ..CreateSession::default()
    };
    let other = sessions.create(create, grace).await.unwrap().id;
    until_state(&sessions, &other, SessionState::Idle).await;
    sessions.delete(&first).await.unwrap();
    until_state(&sessions, &second.id, SessionState::Idle).await;
}

#[tokio::test]
async fn session_with_running_command_keeps_its_slot() {
    let harness = limited(1, None).await;
    let sessions = harness.serve().await;
    let first = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &first, SessionState::Idle).await;
    let request =
        ExecRequest { argv: vec!["sleep".into(), "600".into()], ..ExecRequest::default() };
    let command = exec(&sessions, &first, request).await.unwrap();
    let second = harness.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &second, StateReason::LimitSandboxes).await;
    assert_eq!(sessions.get(&first).await.unwrap().state, SessionState::Idle);
    drop(command);
    until_state(&sessions, &second, SessionState::Idle).await;
    assert_eq!(sessions.get(&first).await.unwrap().reason, StateReason::SlotNeeded);
}

#[tokio::test]
async fn waiting_command_fails_when_session_is_paused() {
    let harness = limited(1, None).await;
    let sessions = harness.serve().await;
    let first = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &first, SessionState::Idle).await;
    sessions.pause(&first).await.unwrap();
    until_state(&sessions, &first, SessionState::Paused).await;
    let second = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &second, started).await;
    let request = ExecRequest { argv: vec!["true".into()], ..ExecRequest::default() };
    let pausing = async {
        until_reason(&sessions, &first, StateReason::LimitSandboxes).await;
        sessions.pause(&first).await.unwrap();
    };
    let both = async { tokio::join!(exec(&sessions, &first, request), pausing).0 };
    let refused = tokio::time::timeout(Duration::from_secs(20), both)
        .await
        .expect("it does not wait for the slot");
    assert_eq!(refused.err().unwrap().code(), "not_ready");
}

#[tokio::test]
async fn push_is_checked_when_all_slots_are_taken() {
    let harness = limited(1, None).await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let session = harness.session(&sessions, Some("hold")).await;
    until(&sessions, &session.id, started).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let (repository, branch, commit) = (demo(), session.branch, "c0ffee".into());
    ledger.log(&session.id, EventBody::Pushed { repository, branch, commit }).await;
    harness.fake.finish_turn(&sandbox(&sessions, &session.id).await);
    let event = until(&sessions, &session.id, |event| {
        matches!(event.body, EventBody::Evidence(_) | EventBody::Warning { .. })
    });
    assert!(matches!(event.await.body, EventBody::Evidence(_)));
}

#[tokio::test]
async fn session_restores_earlier_and_later_turns() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /note one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let second = send(&sessions, &id, "write /note two").await;
    until_status(&sessions, &id, &second, PromptStatus::Completed).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let note =
        async |sessions: &Sessions| harness.fake.file(&sandbox(sessions, &id).await, "/note");
    for (turn, expected) in [(1, "one"), (2, "two"), (1, "one")] {
        sessions.restore(&id, &RestorePoint::Turn(turn)).await.unwrap();
        until_state(&sessions, &id, SessionState::Idle).await;
        assert_eq!(note(&sessions).await, Some(expected.as_bytes().to_vec()));
    }
    let restored = |event: &&Event| matches!(event.body, EventBody::Restored { .. });
    assert_eq!(all(&sessions, &id).await.iter().filter(restored).count(), 3);
    let third = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &third, PromptStatus::Completed).await;
    let numbers: Vec<u32> =
        sessions.turns(&id).await.unwrap().iter().map(|turn| turn.number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    assert_eq!(
        sessions.restore(&id, &RestorePoint::Turn(9)).await.unwrap_err().code(),
        "not_found"
    );
}

#[tokio::test]
async fn restore_stops_running_turn_first() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /note one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let second = send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    sessions.restore(&id, &RestorePoint::Turn(1)).await.unwrap();
    assert_eq!(status(&sessions, &id, &second).await, PromptStatus::Stopped);
    until_state(&sessions, &id, SessionState::Idle).await;
    assert!(
        sessions.turns(&id).await.unwrap()[1].snapshot_id.is_some(),
        "the stopped turn can be restored"
    );
}

#[tokio::test]
async fn terminated_session_resumes_with_its_disk() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /kept yes")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let held = send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    sessions.terminate(&id).await.unwrap();
    let ended = sessions.get(&id).await.unwrap();
    assert_eq!(
        (ended.state, ended.reason, &ended.sandbox),
        (SessionState::Paused, StateReason::Terminated, &None)
    );
    assert_eq!(status(&sessions, &id, &held).await, PromptStatus::Stopped);
    let kinds: Vec<SnapshotKind> =
        sessions.snapshots(&id).await.unwrap().iter().map(|snapshot| snapshot.kind).collect();
    assert_eq!(kinds, [SnapshotKind::Turn, SnapshotKind::Recovered]);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert!(harness.fake.file(&sandbox(&sessions, &id).await, "/kept").is_some());
}

#[tokio::test]
async fn turns_and_queued_prompts_continue_after_shutdown() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let busy = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &busy, started).await;
    let waiting = send(&sessions, &busy, "hello").await;
    let idle = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &idle, SessionState::Idle).await;
    sessions.suspend_all(Duration::from_secs(20)).await;
    let late = send(&sessions, &idle, "too late for this server").await;
    let held = sandbox(&sessions, &busy).await;
    assert_eq!(harness.fake.sandboxes(), std::slice::from_ref(&held), "the other one is saved");
    assert!(harness.fake.is_frozen(&held), "the turn does not run without a server");
    sessions.close().await;
    let sessions = harness.serve().await;
    until(&sessions, &idle, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    harness.fake.finish_turn(&held);
    until_status(&sessions, &busy, &waiting, PromptStatus::Completed).await;
    until_status(&sessions, &idle, &late, PromptStatus::Completed).await;
    assert_eq!(harness.fake.prompts_run().len(), 4, "nothing ran twice");
}

#[tokio::test]
async fn resting_session_is_unloaded_and_loaded_again() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let rests = harness.session(&sessions, Some("hello")).await.id;
    let works = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &works, started).await;
    until_state(&sessions, &rests, SessionState::Idle).await;
    sessions.pause(&rests).await.unwrap();
    until_state(&sessions, &rests, SessionState::Paused).await;
    while sessions.unload_resting() > 1 {
        tokio::task::yield_now().await;
    }
    // Requests at the same time as the unloading lose nothing.
    let next = send(&sessions, &rests, "again").await;
    until_status(&sessions, &rests, &next, PromptStatus::Completed).await;
    for _ in 0..20 {
        sessions.unload_resting();
        sessions.pause(&rests).await.unwrap();
        sessions.unload_resting();
        let next = send(&sessions, &rests, "again").await;
        until_status(&sessions, &rests, &next, PromptStatus::Completed).await;
    }
    assert_gapless(&all(&sessions, &rests).await);
    harness.fake.finish_turn(&sandbox(&sessions, &works).await);
    until_state(&sessions, &works, SessionState::Idle).await;
}
