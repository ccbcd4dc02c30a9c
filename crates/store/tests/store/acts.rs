//! What a session goes through, in every kind of write, read back as it was written.

use harvest_proto::{
    EventBody, PromptId, SandboxId, SnapshotId, Timestamp, TurnId,
    api::{PromptStatus, SessionState},
    event::{SnapshotKind, TurnOutcome, Usage},
};
use harvest_store::{Removal, StoreError, Write};

use crate::home::{Home, NOW, dispatch, on_both, prompt, token};

on_both! {
    every_kind_of_write_is_read_back_as_it_was_written,
    an_epoch_never_goes_back,
    a_snapshot_is_pinned_dropped_and_removed_once,
    a_token_is_replaced_and_its_use_is_noted,
}

async fn every_kind_of_write_is_read_back_as_it_was_written(home: Home) {
    let session = home.session().await;
    let (id, turn, snapshot) = (PromptId::random(), TurnId::random(), SnapshotId::random());
    let usage =
        Usage { input_tokens: 1, output_tokens: 2, cache_read_tokens: 3, cache_write_tokens: 4 };
    let drive = Write::Drive {
        drive: "{}".into(),
        state: SessionState::Running,
        reason: "prompt".into(),
        sandbox: Some(SandboxId::random()),
        epoch: 2,
        snapshot: Some(snapshot.clone()),
    };
    let begin = Write::TurnInsert { turn: turn.clone(), number: 1, prompt: id.clone(), at: NOW };
    home.commit(&session, vec![prompt(&id), dispatch(&id), begin, drive]).await.unwrap();
    let inside = EventBody::Warning { message: "inside".into() };
    let end = Write::TurnEnd { turn: turn.clone(), outcome: TurnOutcome::Completed, at: NOW };
    let done = Write::PromptStatus {
        prompt: id.clone(),
        from: PromptStatus::Dispatched,
        to: PromptStatus::Completed,
    };
    let kept = Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn: Some(turn.clone()),
        at: NOW,
    };
    let texts = [
        Write::Title("title".into()),
        Write::DefaultBase { repository: "r".into(), base: "main".into() },
        Write::DefaultBase { repository: "r".into(), base: "another".into() },
        Write::BaseCommit { repository: "r".into(), commit: "c1".into() },
        Write::Pushed { repository: "r".into(), commit: "c2".into() },
        Write::Reviewed { repository: "r".into(), commit: "c3".into() },
        Write::Position(Some(4)),
        Write::Made { key: "k".into(), id: "prm_1".into() },
    ];
    let mut writes = vec![Write::EventInTurn { at: NOW, body: Box::new(inside) }, end, done, kept];
    writes.extend([Write::Usage(usage), Write::Usage(usage)]);
    writes.extend(texts);
    home.commit(&session, writes).await.unwrap();

    let record = home.store.session_get(&session).await.unwrap();
    assert_eq!(record.session.usage.output_tokens, 4);
    assert_eq!((record.session.state, record.session.epoch), (SessionState::Running, 2));
    let checkout = &record.checkouts[0];
    assert_eq!((record.session.title.as_str(), checkout.base.as_deref()), ("title", Some("main")));
    assert_eq!(checkout.base_commit.as_deref(), Some("c1"));
    assert_eq!(
        (checkout.pushed_commit.as_deref(), checkout.reviewed_commit.as_deref()),
        (Some("c2"), Some("c3"))
    );
    let turns = home.store.turn_list(&session).await.unwrap();
    assert_eq!(
        (turns[0].outcome, turns[0].snapshot.clone()),
        (Some(TurnOutcome::Completed), Some(snapshot))
    );
    assert_eq!(home.store.prompt_list(&session).await.unwrap()[0].turn, Some(turn.clone()));
    let newest = home.store.event_newest(&session, u64::MAX, 1).await.unwrap();
    assert_eq!(newest[0].turn, Some(turn));
}

async fn an_epoch_never_goes_back(home: Home) {
    let session = home.session().await;
    let drive = |epoch, reason: &str| Write::Drive {
        drive: String::new(),
        state: SessionState::Idle,
        reason: reason.into(),
        sandbox: None,
        epoch,
        snapshot: None,
    };
    home.commit(&session, vec![drive(3, "newer")]).await.unwrap();
    home.commit(&session, vec![drive(2, "older")]).await.unwrap();
    let record = home.store.session_get(&session).await.unwrap().session;
    assert_eq!((record.epoch, record.reason.as_str()), (3, "newer"));
}

async fn a_snapshot_is_pinned_dropped_and_removed_once(home: Home) {
    let (session, fork) = (home.session().await, home.session().await);
    let (one, two) = (SnapshotId::random(), SnapshotId::random());
    let keep = |id: &SnapshotId| Write::SnapshotInsert {
        snapshot: id.clone(),
        kind: SnapshotKind::Pause,
        turn: None,
        at: NOW,
    };
    home.commit(&session, vec![keep(&one), keep(&two)]).await.unwrap();
    home.commit(&fork, vec![Write::SnapshotShare { snapshot: two.clone(), at: NOW }])
        .await
        .unwrap();
    home.store.snapshot_pin(&session, home.lease, &one, true).await.unwrap();
    let missing = home.store.snapshot_pin(&session, home.lease, &SnapshotId::random(), true).await;
    assert!(matches!(missing, Err(StoreError::NotFound { .. })));
    let drop = async || {
        let both = vec![one.clone(), two.clone()];
        home.store.snapshot_drop(&session, home.lease, both, "retention", NOW).await.unwrap()
    };
    assert_eq!(drop().await, [], "one is pinned, and the fork stands on the other");
    home.store.snapshot_pin(&session, home.lease, &one, false).await.unwrap();
    assert_eq!(drop().await, [Removal::Snapshot(one.clone())]);
    home.store.snapshot_gone(&fork, home.lease, &two, true).await.unwrap();
    assert_eq!(home.store.snapshot_list(&fork).await.unwrap().len(), 1);
    assert_eq!(home.store.snapshot_all().await.unwrap().len(), 1);
    assert!(home.store.snapshot_of_builds().await.unwrap().is_empty());
    let sandbox = Removal::Sandbox(SandboxId::random());
    home.store.removal_add(home.lease, vec![sandbox.clone(), sandbox.clone()], NOW).await.unwrap();
    assert_eq!(
        home.store.removal_list().await.unwrap(),
        [sandbox.clone(), Removal::Snapshot(one.clone())]
    );
    home.store.removal_done(home.lease, &sandbox).await.unwrap();
    assert_eq!(home.store.removal_list().await.unwrap(), [Removal::Snapshot(one)]);
}

async fn a_token_is_replaced_and_its_use_is_noted(home: Home) {
    home.store.token_insert("h1", &token("t")).await.unwrap();
    home.store.token_replace("h2", &token("t")).await.unwrap();
    assert_eq!(home.store.token_find("h1").await.unwrap(), None);
    home.store.token_used("t", Timestamp::from_millis(5)).await.unwrap();
    assert_eq!(home.store.token_get("t").await.unwrap().last_used, Some(Timestamp::from_millis(5)));
    assert!(matches!(home.store.token_get("u").await, Err(StoreError::NotFound { .. })));
}
