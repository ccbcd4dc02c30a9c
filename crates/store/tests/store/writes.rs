//! Every kind of write, read back.

use harvest_proto::{
    EventBody, PromptId, SandboxId, SnapshotId, StateReason, Timestamp, TurnId, TurnReason,
    api::{AgentInfo, PromptStatus, SessionState},
    event::{McpServer, McpState, SnapshotKind, TurnOutcome, Usage},
};
use harvest_store::{DriverState, Removal, StoreError, Write};

use crate::test_store::{NOW, TestStore, dispatch, on_both, prompt, token};

on_both! {
    every_write_is_read_back,
    epoch_never_decreases,
    snapshot_is_dropped_only_when_unpinned_and_unused,
    token_is_replaced_and_last_use_recorded,
}

async fn every_write_is_read_back(test: TestStore) {
    let session = test.session().await;
    let (id, turn, snapshot) = (PromptId::random(), TurnId::random(), SnapshotId::random());
    let usage =
        Usage { input_tokens: 1, output_tokens: 2, cache_read_tokens: 3, cache_write_tokens: 4 };
    let driver_state = Write::DriverState(DriverState {
        json: "{}".into(),
        state: SessionState::Running,
        reason: StateReason::Turn,
        sandbox: Some(SandboxId::random()),
        epoch: 2,
        snapshot: Some(snapshot.clone()),
        resting: false,
    });
    let begin = Write::TurnInsert { turn: turn.clone(), number: 1, prompt: id.clone(), at: NOW };
    test.commit(&session, vec![prompt(&id), dispatch(&id), begin, driver_state]).await.unwrap();
    let inside = EventBody::Warning { message: "inside".into() };
    let end = Write::TurnEnd {
        turn: turn.clone(),
        outcome: TurnOutcome::Failed,
        reason: Some(TurnReason::Silent),
        at: NOW,
    };
    let done = Write::PromptStatus {
        prompt: id.clone(),
        from: PromptStatus::Dispatched,
        to: PromptStatus::Completed,
    };
    let taken = Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn: Some(turn.clone()),
        at: NOW,
    };
    let server = McpServer { name: "harvest".into(), state: McpState::Connected };
    let info = AgentInfo { version: Some("2.1".into()), model: None, mcp: vec![server] };
    let texts = [
        Write::Title("title".into()),
        Write::AgentInfo(Box::default()),
        Write::AgentInfo(Box::new(info.clone())),
        Write::DefaultBase { repository: "o/r".parse().unwrap(), base: "main".parse().unwrap() },
        Write::DefaultBase { repository: "o/r".parse().unwrap(), base: "another".parse().unwrap() },
        Write::BaseCommit { repository: "o/r".parse().unwrap(), commit: "c1".into() },
        Write::Pushed { repository: "o/r".parse().unwrap(), commit: "c2".into() },
        Write::Reviewed { repository: "o/r".parse().unwrap(), commit: "c3".into() },
        Write::Position(Some(4)),
        Write::CreatedId { key: "k".into(), id: "prm_1".into() },
    ];
    let mut writes = vec![Write::EventInTurn { at: NOW, body: Box::new(inside) }, end, done, taken];
    writes.extend(texts);
    test.spend(&session, usage, 1).await;
    test.spend(&session, usage, 1).await;
    test.commit(&session, writes).await.unwrap();

    let record = test.store.session_get(&session).await.unwrap();
    assert_eq!(record.session.usage.output_tokens, 4);
    assert_eq!((record.session.state, record.session.epoch), (SessionState::Running, 2));
    let checkout = &record.checkouts[0];
    assert_eq!((record.session.title.as_str(), checkout.base.as_deref()), ("title", Some("main")));
    assert_eq!(checkout.base_commit.as_deref(), Some("c1"));
    assert_eq!(
        (checkout.pushed_commit.as_deref(), checkout.reviewed_commit.as_deref()),
        (Some("c2"), Some("c3"))
    );
    assert_eq!(test.store.session_get(&session).await.unwrap().session.agent_info, Some(info));
    let turns = test.store.turn_list(&session).await.unwrap();
    assert_eq!(
        (turns[0].outcome, turns[0].reason, turns[0].snapshot_id.clone()),
        (Some(TurnOutcome::Failed), Some(TurnReason::Silent), Some(snapshot))
    );
    assert_eq!(test.store.prompt_list(&session).await.unwrap()[0].turn, Some(turn.clone()));
    let events = test.store.event_list(&session, 0, 100).await.unwrap();
    assert_eq!(events.last().unwrap().turn, Some(turn));
}

async fn epoch_never_decreases(test: TestStore) {
    let session = test.session().await;
    let driver_state = |epoch, reason| {
        Write::DriverState(DriverState {
            json: String::new(),
            state: SessionState::Idle,
            reason,
            sandbox: None,
            epoch,
            snapshot: None,
            resting: false,
        })
    };
    test.commit(&session, vec![driver_state(3, StateReason::Ready)]).await.unwrap();
    test.commit(&session, vec![driver_state(2, StateReason::Frozen)]).await.unwrap();
    let record = test.store.session_get(&session).await.unwrap().session;
    assert_eq!((record.epoch, record.reason), (3, StateReason::Ready));
}

async fn snapshot_is_dropped_only_when_unpinned_and_unused(test: TestStore) {
    let (session, fork) = (test.session().await, test.session().await);
    let (one, two) = (SnapshotId::random(), SnapshotId::random());
    let insert = |id: &SnapshotId| Write::SnapshotInsert {
        snapshot: id.clone(),
        kind: SnapshotKind::Pause,
        turn: None,
        at: NOW,
    };
    test.commit(&session, vec![insert(&one), insert(&two)]).await.unwrap();
    test.commit(&fork, vec![Write::SnapshotShare { snapshot: two.clone(), at: NOW }])
        .await
        .unwrap();
    test.store.snapshot_pin(&session, test.lease, &one, true).await.unwrap();
    let missing = test.store.snapshot_pin(&session, test.lease, &SnapshotId::random(), true).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
    let drop = async || {
        let both = vec![one.clone(), two.clone()];
        test.store.snapshot_drop(&session, test.lease, both, "retention", NOW).await.unwrap()
    };
    assert_eq!(drop().await, [], "one is pinned, the other is used by the fork");
    test.store.snapshot_pin(&session, test.lease, &one, false).await.unwrap();
    assert_eq!(drop().await, [Removal::Snapshot(one.clone())]);
    test.store.snapshot_gone(&fork, test.lease, &two, true).await.unwrap();
    assert_eq!(test.store.snapshot_list(&fork).await.unwrap().len(), 1);
    assert_eq!(test.store.snapshot_all().await.unwrap().len(), 1);
    assert!(test.store.snapshot_of_builds().await.unwrap().is_empty());
    let sandbox = Removal::Sandbox(SandboxId::random());
    test.store.removal_add(test.lease, vec![sandbox.clone(), sandbox.clone()], NOW).await.unwrap();
    assert_eq!(
        test.store.removal_list().await.unwrap(),
        [sandbox.clone(), Removal::Snapshot(one.clone())]
    );
    test.store.removal_done(test.lease, &sandbox).await.unwrap();
    assert_eq!(test.store.removal_list().await.unwrap(), [Removal::Snapshot(one)]);
}

async fn token_is_replaced_and_last_use_recorded(test: TestStore) {
    test.store.token_insert("h1", &token("t")).await.unwrap();
    test.store.token_replace("h2", &token("t")).await.unwrap();
    assert_eq!(test.store.token_find("h1").await.unwrap(), None);
    test.store.token_used("t", Timestamp::from_millis(5)).await.unwrap();
    assert_eq!(test.store.token_get("t").await.unwrap().last_used, Some(Timestamp::from_millis(5)));
    assert!(matches!(test.store.token_get("u").await, Err(StoreError::NotFound { .. })));
}
