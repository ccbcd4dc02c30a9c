//! Sessions that rest are found by no query of a start or of retention.

use harvest_proto::{
    PromptId, SandboxId, SessionId, SnapshotId, StateReason, Timestamp, api::SessionState,
    event::SnapshotKind,
};
use harvest_store::{DriverState, Write};

use crate::test_store::{NOW, TestStore, on_both, prompt};

on_both! {
    only_sessions_with_work_are_at_work,
    retention_reads_only_sessions_it_may_change,
}

fn state(state: SessionState, sandbox: Option<SandboxId>) -> Write {
    Write::DriverState(DriverState {
        json: "{}".into(),
        state,
        reason: StateReason::Ready,
        resting: sandbox.is_none(),
        sandbox,
        epoch: 0,
        snapshot: None,
    })
}

async fn only_sessions_with_work_are_at_work(test: TestStore) {
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(test.session().await);
    }
    let [rests, new, runs, queued, pushed] = &all[..] else { unreachable!() };
    let resting = || state(SessionState::Paused, None);
    let (repository, commit) = ("o/r".parse().unwrap(), "c0ffee".to_owned());
    let push = Write::Pushed { repository, commit };
    test.commit(rests, vec![resting()]).await.unwrap();
    let sandbox = SandboxId::random();
    test.commit(runs, vec![state(SessionState::Idle, Some(sandbox.clone()))]).await.unwrap();
    test.commit(queued, vec![resting(), prompt(&PromptId::random())]).await.unwrap();
    test.commit(pushed, vec![resting(), push]).await.unwrap();
    let mut found: Vec<SessionId> = Vec::new();
    for record in test.store.session_at_work().await.unwrap() {
        assert_eq!(record.checkouts.len(), 2);
        found.push(record.session.id);
    }
    found.sort();
    let mut wanted = [new, runs, queued, pushed].map(Clone::clone);
    wanted.sort();
    assert_eq!(found, wanted);
    assert_eq!(test.store.session_sandboxes().await.unwrap(), [sandbox].into());
    let (repository, commit) = ("o/r".parse().unwrap(), "c0ffee".to_owned());
    test.commit(pushed, vec![Write::Reviewed { repository, commit }]).await.unwrap();
    assert_eq!(test.store.session_at_work().await.unwrap().len(), 3);
}

async fn retention_reads_only_sessions_it_may_change(test: TestStore) {
    let (open, archived) = (test.session().await, test.session().await);
    let insert = || Write::SnapshotInsert {
        snapshot: SnapshotId::random(),
        kind: SnapshotKind::Turn,
        turn: None,
        at: NOW,
    };
    test.commit(&archived, vec![state(SessionState::Archived, None), insert()]).await.unwrap();
    test.commit(&open, vec![insert(), insert()]).await.unwrap();
    let found = async |quiet: Option<i64>, most| {
        let quiet = quiet.map(Timestamp::from_millis);
        test.store.session_for_retention(quiet, most).await.unwrap()
    };
    assert_eq!(found(None, 2).await, [], "each has as many as it may keep");
    assert_eq!(found(None, 1).await, std::slice::from_ref(&open));
    assert_eq!(
        found(Some(NOW.as_millis()), 2).await,
        std::slice::from_ref(&archived),
        "it expires"
    );
    test.commit(&archived, vec![insert()]).await.unwrap();
    assert_eq!(found(None, 2).await, [archived], "it keeps only its newest");
}
