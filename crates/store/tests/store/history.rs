//! Turns, shared and dropped snapshots, removals.

use harvest_proto::{
    PromptId, SessionId, SnapshotId, StateReason, TurnId,
    api::{DiffStat, SessionState},
    event::{SnapshotKind, Usage},
};
use harvest_store::{DriverState, Removal, StoreError, TurnTree, Write};

use crate::test_store::{NOW, TestStore, dispatch, new_session, on_both, prompt};

on_both! {
    turn_has_prompt_usage_and_diff,
    turn_continues_the_turn_of_its_snapshot,
    needed_snapshots_are_not_dropped,
    fork_needs_an_existing_snapshot,
    missing_snapshot_is_hidden_until_it_returns,
    removals_are_listed_until_done,
    several_sessions_are_created_or_none,
}

/// A turn with a prompt and a snapshot.
async fn turn(test: &TestStore, session: &SessionId, number: u32) -> (TurnId, SnapshotId) {
    let (id, turn, snapshot) = (PromptId::random(), TurnId::random(), SnapshotId::random());
    let begin = Write::TurnInsert { turn: turn.clone(), number, prompt: id.clone(), at: NOW };
    let taken = Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn: Some(turn.clone()),
        at: NOW,
    };
    test.commit(session, vec![prompt(&id), dispatch(&id), begin, taken]).await.unwrap();
    (turn, snapshot)
}

async fn turn_has_prompt_usage_and_diff(test: TestStore) {
    let session = test.session().await;
    let (id, snapshot) = turn(&test, &session, 1).await;
    let usage = Usage { input_tokens: 5, output_tokens: 7, ..Usage::default() };
    let stat = DiffStat { files: 2, insertions: 10, deletions: 3 };
    let tree = |repository: &str, tree: &str| Write::TurnTree {
        turn: id.clone(),
        after: 0,
        repository: repository.parse().unwrap(),
        tree: tree.to_owned(),
        stat,
    };
    test.spend(&session, usage, 0).await;
    let writes = vec![tree("o/a", "t1"), tree("o/b", "t2"), tree("o/a", "t3")];
    test.commit(&session, writes).await.unwrap();
    for turn in [
        test.store.turn_get(&session, 1).await.unwrap(),
        test.store.turn_list(&session).await.unwrap().remove(0),
    ] {
        assert_eq!((turn.text.as_str(), turn.usage, turn.after), ("do", usage, None));
        assert_eq!(turn.diff, Some(DiffStat { files: 4, insertions: 20, deletions: 6 }));
        assert_eq!(turn.snapshot_id.as_ref(), Some(&snapshot));
    }
    assert_eq!(test.store.session_get(&session).await.unwrap().session.usage, usage);
    let of = |repository: &str, tree: &str| TurnTree {
        turn: 1,
        repository: repository.parse().unwrap(),
        tree: tree.into(),
    };
    assert_eq!(test.store.tree_list(&session).await.unwrap(), [of("o/a", "t3"), of("o/b", "t2")]);
    assert_eq!(test.store.tree_list_of(&session, 1).await.unwrap().len(), 2);
    assert_eq!(test.store.tree_list_of(&session, 0).await.unwrap(), []);
    assert!(matches!(test.store.turn_get(&session, 2).await, Err(StoreError::NotFound { .. })));
    let fork = test.session().await;
    test.commit(&fork, vec![Write::TreeShare { session, turn: 1 }]).await.unwrap();
    assert!(test.store.tree_list(&fork).await.unwrap().iter().all(|tree| tree.turn == 0));
}

async fn turn_continues_the_turn_of_its_snapshot(test: TestStore) {
    let (session, fork) = (test.session().await, test.session().await);
    let (_, snapshot) = turn(&test, &session, 1).await;
    let (unknown, seventh) = (SnapshotId::random(), TurnId::random());
    let (prompt, turn) = (PromptId::random(), seventh.clone());
    let begin = Write::TurnInsert { turn, number: 7, prompt, at: NOW };
    test.commit(&session, vec![begin]).await.unwrap();
    let share = Write::SnapshotShare { snapshot: snapshot.clone(), at: NOW };
    test.commit(&fork, vec![share]).await.unwrap();
    for (session, turn, from, number) in [
        (&session, &seventh, &snapshot, 1),
        (&session, &seventh, &unknown, 6),
        (&session, &TurnId::random(), &unknown, 0),
        (&fork, &TurnId::random(), &snapshot, 0),
    ] {
        assert_eq!(test.store.turn_before(session, turn, from).await.unwrap(), number);
    }
}

async fn needed_snapshots_are_not_dropped(test: TestStore) {
    let (session, other) = (test.session().await, test.session().await);
    let insert = |snapshot: &SnapshotId| Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Pause,
        turn: None,
        at: NOW,
    };
    let (_, free) = turn(&test, &session, 1).await;
    let ids: Vec<SnapshotId> = (0..4).map(|_| SnapshotId::random()).collect();
    let [pinned, newest, pending, shared] = &ids[..] else { unreachable!() };
    test.commit(&session, ids.iter().map(insert).collect()).await.unwrap();
    test.commit(&other, vec![insert(shared)]).await.unwrap();
    let driver_state = Write::DriverState(DriverState {
        json: format!("{{\"saving\":\"{pending}\"}}"),
        state: SessionState::Idle,
        reason: StateReason::Ready,
        sandbox: None,
        epoch: 1,
        snapshot: Some(newest.clone()),
        resting: true,
    });
    test.commit(&session, vec![driver_state]).await.unwrap();
    test.store.snapshot_pin(&session, test.lease, pinned, true).await.unwrap();
    let all = ids.iter().cloned().chain([free.clone()]).collect();
    let dropped = test.store.snapshot_drop(&session, test.lease, all, "quota", NOW).await.unwrap();
    assert_eq!(dropped, [Removal::Snapshot(free)]);
    assert_eq!(test.store.removal_list().await.unwrap(), dropped);
    let left: Vec<_> =
        test.store.snapshot_list(&session).await.unwrap().into_iter().map(|one| one.id).collect();
    assert!(
        left.len() == 3 && !left.contains(shared),
        "a shared snapshot is removed from this session"
    );
    let turn = test.store.turn_list(&session).await.unwrap().remove(0);
    assert_eq!((turn.snapshot_id, turn.dropped.as_deref()), (None, Some("quota")));
    let unknown = test.store.snapshot_pin(&session, test.lease, shared, true).await;
    assert!(matches!(unknown, Err(StoreError::NotFound { .. })));
}

async fn fork_needs_an_existing_snapshot(test: TestStore) {
    let source = test.session().await;
    let (_, snapshot) = turn(&test, &source, 1).await;
    let share =
        |snapshot: &SnapshotId| Write::SnapshotShare { snapshot: snapshot.clone(), at: NOW };
    let fork = new_session();
    let id = fork.id.clone();
    test.store.session_insert_all(test.lease, vec![(fork, vec![share(&snapshot)])]).await.unwrap();
    let began = test.store.snapshot_list(&id).await.unwrap().remove(0);
    assert_eq!((began.id, began.turn), (snapshot, Some(0)));
    let late = new_session();
    let id = late.id.clone();
    let refused = test
        .store
        .session_insert_all(test.lease, vec![(late, vec![share(&SnapshotId::random())])])
        .await;
    assert!(matches!(refused, Err(StoreError::NotFound { .. })));
    assert!(matches!(test.store.session_get(&id).await, Err(StoreError::NotFound { .. })));
}

async fn missing_snapshot_is_hidden_until_it_returns(test: TestStore) {
    let session = test.session().await;
    let (_, snapshot) = turn(&test, &session, 1).await;
    for (gone, wanted) in [(true, (None, Some("gone"))), (false, (Some(snapshot.clone()), None))] {
        test.store.snapshot_gone(&session, test.lease, &snapshot, gone).await.unwrap();
        let turn = test.store.turn_list(&session).await.unwrap().remove(0);
        assert_eq!((turn.snapshot_id, turn.dropped.as_deref()), wanted);
    }
}

async fn removals_are_listed_until_done(test: TestStore) {
    let copy = |secret: Option<&str>| Removal::ForgeCopy {
        url: "http://forge/a.git".into(),
        secret: secret.map(str::to_owned),
    };
    let removals = vec![
        copy(None),
        copy(Some("FORGE_A")),
        Removal::Sandbox(harvest_proto::SandboxId::random()),
        Removal::Snapshot(SnapshotId::random()),
        Removal::State("o/r".parse().unwrap()),
    ];
    for _ in 0..2 {
        let backwards = removals.iter().rev().cloned().collect();
        test.store.removal_add(test.lease, backwards, NOW).await.unwrap();
    }
    assert_eq!(
        test.store.removal_list().await.unwrap(),
        removals,
        "sandboxes come before snapshots"
    );
    for removal in &removals {
        test.store.removal_done(test.lease, removal).await.unwrap();
        test.store.removal_done(test.lease, removal).await.unwrap();
    }
    assert!(test.store.removal_list().await.unwrap().is_empty());
    test.store.server_lease(NOW).await.unwrap();
    let late = test.store.removal_add(test.lease, removals, NOW).await;
    assert!(matches!(late, Err(StoreError::LeaseLost)));
}

async fn several_sessions_are_created_or_none(test: TestStore) {
    let (first, second) = (new_session(), new_session());
    let ids = [first.id.clone(), second.id.clone()];
    let twice = vec![
        (first.clone(), Vec::new()),
        (second.clone(), Vec::new()),
        (first.clone(), Vec::new()),
    ];
    assert!(matches!(
        test.store.session_insert_all(test.lease, twice).await,
        Err(StoreError::Exists { .. })
    ));
    for id in &ids {
        assert!(matches!(test.store.session_get(id).await, Err(StoreError::NotFound { .. })));
    }
    let both = vec![(first, Vec::new()), (second, Vec::new())];
    test.store.session_insert_all(test.lease, both).await.unwrap();
    for id in &ids {
        test.store.session_get(id).await.unwrap();
    }
}
