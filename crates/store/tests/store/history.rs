//! Turns in full, snapshots that are shared, pinned and dropped, and what is to be removed.

use harvest_proto::{
    PromptId, SessionId, SnapshotId, TurnId,
    api::{DiffStat, SessionState},
    event::{SnapshotKind, Usage},
};
use harvest_store::{Removal, StoreError, TurnTree, Write};

use crate::home::{Home, NOW, dispatch, new_session, on_both, prompt};

on_both! {
    a_turn_has_its_prompt_its_tokens_and_what_it_changed,
    a_snapshot_is_dropped_unless_somebody_may_need_it,
    a_fork_begins_with_what_is_there_or_not_at_all,
    a_snapshot_that_is_gone_is_no_turns_any_more_until_it_is_back,
    what_is_to_be_removed_is_listed_until_it_is_done,
    several_sessions_are_made_or_none,
}

/// A turn of a prompt, with its snapshot.
async fn turn(home: &Home, session: &SessionId, number: u32) -> (TurnId, SnapshotId) {
    let (id, turn, snapshot) = (PromptId::random(), TurnId::random(), SnapshotId::random());
    let begin = Write::TurnInsert { turn: turn.clone(), number, prompt: id.clone(), at: NOW };
    let kept = Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn: Some(turn.clone()),
        at: NOW,
    };
    home.commit(session, vec![prompt(&id), dispatch(&id), begin, kept]).await.unwrap();
    (turn, snapshot)
}

async fn a_turn_has_its_prompt_its_tokens_and_what_it_changed(home: Home) {
    let session = home.session().await;
    let (id, snapshot) = turn(&home, &session, 1).await;
    let usage = Usage { input_tokens: 5, output_tokens: 7, ..Usage::default() };
    let stat = DiffStat { files: 2, insertions: 10, deletions: 3 };
    let tree = |repository: &str, tree: &str| Write::TurnTree {
        turn: id.clone(),
        after: 0,
        repository: repository.to_owned(),
        tree: tree.to_owned(),
        stat,
    };
    let writes = vec![Write::Usage(usage), tree("a", "t1"), tree("b", "t2"), tree("a", "t3")];
    home.commit(&session, writes).await.unwrap();
    for turn in [
        home.store.turn_get(&session, 1).await.unwrap(),
        home.store.turn_list(&session).await.unwrap().remove(0),
    ] {
        assert_eq!((turn.text.as_str(), turn.usage, turn.after), ("do", usage, None));
        assert_eq!(turn.diff, Some(DiffStat { files: 4, insertions: 20, deletions: 6 }));
        assert_eq!(turn.snapshot.as_ref(), Some(&snapshot));
    }
    assert_eq!(home.store.session_get(&session).await.unwrap().session.usage, usage);
    let of = |repository: &str, tree: &str| TurnTree {
        turn: 1,
        repository: repository.into(),
        tree: tree.into(),
    };
    assert_eq!(home.store.tree_list(&session).await.unwrap(), [of("a", "t3"), of("b", "t2")]);
    assert!(matches!(home.store.turn_get(&session, 2).await, Err(StoreError::NotFound { .. })));
    let fork = home.session().await;
    home.commit(&fork, vec![Write::TreeShare { session, turn: 1 }]).await.unwrap();
    assert!(home.store.tree_list(&fork).await.unwrap().iter().all(|tree| tree.turn == 0));
}

async fn a_snapshot_is_dropped_unless_somebody_may_need_it(home: Home) {
    let (session, other) = (home.session().await, home.session().await);
    let keep = |snapshot: &SnapshotId| Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Pause,
        turn: None,
        at: NOW,
    };
    let (_, free) = turn(&home, &session, 1).await;
    let ids: Vec<SnapshotId> = (0..4).map(|_| SnapshotId::random()).collect();
    let [pinned, newest, meant, shared] = &ids[..] else { unreachable!() };
    home.commit(&session, ids.iter().map(keep).collect()).await.unwrap();
    home.commit(&other, vec![keep(shared)]).await.unwrap();
    let drive = Write::Drive {
        drive: format!("{{\"saving\":\"{meant}\"}}"),
        state: SessionState::Idle,
        reason: "r".into(),
        sandbox: None,
        epoch: 1,
        snapshot: Some(newest.clone()),
    };
    home.commit(&session, vec![drive]).await.unwrap();
    home.store.snapshot_pin(&session, home.lease, pinned, true).await.unwrap();
    let all = ids.iter().cloned().chain([free.clone()]).collect();
    let dropped = home.store.snapshot_drop(&session, home.lease, all, "quota", NOW).await.unwrap();
    assert_eq!(dropped, [Removal::Snapshot(free)]);
    assert_eq!(home.store.removal_list().await.unwrap(), dropped);
    let left: Vec<_> =
        home.store.snapshot_list(&session).await.unwrap().into_iter().map(|one| one.id).collect();
    assert!(left.len() == 3 && !left.contains(shared), "a shared one is this session's no longer");
    let turn = home.store.turn_list(&session).await.unwrap().remove(0);
    assert_eq!((turn.snapshot, turn.dropped.as_deref()), (None, Some("quota")));
    let unknown = home.store.snapshot_pin(&session, home.lease, shared, true).await;
    assert!(matches!(unknown, Err(StoreError::NotFound { .. })));
}

async fn a_fork_begins_with_what_is_there_or_not_at_all(home: Home) {
    let source = home.session().await;
    let (_, snapshot) = turn(&home, &source, 1).await;
    let share =
        |snapshot: &SnapshotId| Write::SnapshotShare { snapshot: snapshot.clone(), at: NOW };
    let fork = new_session();
    let id = fork.id.clone();
    home.store.session_insert(home.lease, fork, vec![share(&snapshot)]).await.unwrap();
    let began = home.store.snapshot_list(&id).await.unwrap().remove(0);
    assert_eq!((began.id, began.turn), (snapshot, Some(0)));
    let late = new_session();
    let id = late.id.clone();
    let refused =
        home.store.session_insert(home.lease, late, vec![share(&SnapshotId::random())]).await;
    assert!(matches!(refused, Err(StoreError::NotFound { .. })));
    assert!(matches!(home.store.session_get(&id).await, Err(StoreError::NotFound { .. })));
}

async fn a_snapshot_that_is_gone_is_no_turns_any_more_until_it_is_back(home: Home) {
    let session = home.session().await;
    let (_, snapshot) = turn(&home, &session, 1).await;
    for (gone, wanted) in [(true, (None, Some("gone"))), (false, (Some(snapshot.clone()), None))] {
        home.store.snapshot_gone(&session, home.lease, &snapshot, gone).await.unwrap();
        let turn = home.store.turn_list(&session).await.unwrap().remove(0);
        assert_eq!((turn.snapshot, turn.dropped.as_deref()), wanted);
    }
}

async fn what_is_to_be_removed_is_listed_until_it_is_done(home: Home) {
    let copy = |secret: Option<&str>| Removal::Copy {
        url: "http://forge/a.git".into(),
        secret: secret.map(str::to_owned),
    };
    let removals = vec![
        copy(None),
        copy(Some("FORGE_A")),
        Removal::Sandbox(harvest_proto::SandboxId::random()),
        Removal::Snapshot(SnapshotId::random()),
        Removal::State("r".into()),
    ];
    for _ in 0..2 {
        let backwards = removals.iter().rev().cloned().collect();
        home.store.removal_add(home.lease, backwards, NOW).await.unwrap();
    }
    assert_eq!(home.store.removal_list().await.unwrap(), removals, "sandboxes stand on snapshots");
    for removal in &removals {
        home.store.removal_done(home.lease, removal).await.unwrap();
        home.store.removal_done(home.lease, removal).await.unwrap();
    }
    assert!(home.store.removal_list().await.unwrap().is_empty());
    home.store.server_lease(NOW).await.unwrap();
    let late = home.store.removal_add(home.lease, removals, NOW).await;
    assert!(matches!(late, Err(StoreError::LeaseLost)));
}

async fn several_sessions_are_made_or_none(home: Home) {
    let (first, second) = (new_session(), new_session());
    let ids = [first.id.clone(), second.id.clone()];
    let twice = vec![
        (first.clone(), Vec::new()),
        (second.clone(), Vec::new()),
        (first.clone(), Vec::new()),
    ];
    assert!(matches!(
        home.store.session_insert_all(home.lease, twice).await,
        Err(StoreError::Exists { .. })
    ));
    for id in &ids {
        assert!(matches!(home.store.session_get(id).await, Err(StoreError::NotFound { .. })));
    }
    let both = vec![(first, Vec::new()), (second, Vec::new())];
    home.store.session_insert_all(home.lease, both).await.unwrap();
    for id in &ids {
        home.store.session_get(id).await.unwrap();
    }
}
