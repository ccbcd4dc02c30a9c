//! Records: names are unique, keys are claimed once, lists have an order and pages, what belongs together goes
//! together.

use harvest_proto::{
    PromptId, SandboxId, SnapshotId, Timestamp, TurnId,
    api::{Build, Pull, Repository, Role, SessionState, Token},
    event::SnapshotKind,
};
use harvest_store::{Claim, Removal, StoreError, Write};

use crate::home::{Home, NOW, dispatch, new_session, on_both, outbox, prompt, token};

on_both! {
    an_idempotency_key_gives_the_first_answer_again,
    of_fifty_that_claim_a_key_at_once_one_does_the_work,
    what_a_key_made_is_known_though_nobody_kept_the_answer,
    an_old_key_is_forgotten,
    names_are_unique,
    one_build_of_a_repository_at_a_time,
    pages_of_sessions_neither_repeat_nor_leave_out,
    names_are_ordered_by_their_bytes,
    a_deleted_session_takes_everything_of_its_own_along,
    a_snapshot_a_fork_uses_outlives_the_session_that_took_it,
    a_session_somebody_went_on_with_is_not_deleted_for_its_age,
    a_secret_and_a_fact_are_replaced_by_the_newer,
}

async fn an_idempotency_key_gives_the_first_answer_again(home: Home) {
    let claim =
        async |request: &str| home.store.idempotency_claim("k", request, NOW).await.unwrap();
    assert_eq!(claim("a").await, Claim::New);
    assert_eq!(claim("a").await, Claim::InProgress);
    home.store.idempotency_finish("k", "answer").await.unwrap();
    assert_eq!(claim("a").await, Claim::Done { answer: "answer".into() });
    assert_eq!(claim("b").await, Claim::Mismatch);
    home.store.idempotency_release("k").await.unwrap();
    assert_eq!(claim("a").await, Claim::Done { answer: "answer".into() }, "done is done");
    assert_eq!(home.store.idempotency_claim("l", "a", NOW).await.unwrap(), Claim::New);
    home.store.idempotency_release_all().await.unwrap();
    assert_eq!(home.store.idempotency_claim("l", "a", NOW).await.unwrap(), Claim::New);
}

async fn what_a_key_made_is_known_though_nobody_kept_the_answer(home: Home) {
    let claim = async || home.store.idempotency_claim("k", "a", NOW).await.unwrap();
    let session = home.session().await;
    assert_eq!(claim().await, Claim::New);
    let made = |id: &str| Write::Made { key: "k".into(), id: id.into() };
    // Not with a commit that fails …
    let unknown = Write::SnapshotShare { snapshot: SnapshotId::random(), at: NOW };
    home.commit(&session, vec![made("prm_0"), unknown]).await.unwrap_err();
    assert_eq!(claim().await, Claim::InProgress);
    // … and with one that does not, whatever a server does that starts or gives up.
    home.commit(&session, vec![made("ses_1"), made("ses_2")]).await.unwrap();
    home.store.idempotency_release_all().await.unwrap();
    home.store.idempotency_release("k").await.unwrap();
    assert_eq!(claim().await, Claim::Made { ids: vec!["ses_1".into(), "ses_2".into()] });
    home.store.idempotency_finish("k", "answer").await.unwrap();
    assert_eq!(claim().await, Claim::Done { answer: "answer".into() });
}

async fn of_fifty_that_claim_a_key_at_once_one_does_the_work(home: Home) {
    let all: Vec<_> = (0..50)
        .map(|_| {
            let store = home.store.clone();
            tokio::spawn(async move { store.idempotency_claim("k", "r", NOW).await.unwrap() })
        })
        .collect();
    let mut new = 0;
    for claim in all {
        match claim.await.unwrap() {
            Claim::New => new += 1,
            Claim::InProgress => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(new, 1);
}

async fn a_session_somebody_went_on_with_is_not_deleted_for_its_age(home: Home) {
    let (session, snapshot) = (home.session().await, SnapshotId::random());
    let shown = |state| Write::Drive {
        drive: String::new(),
        state,
        reason: String::new(),
        sandbox: None,
        epoch: 0,
        snapshot: None,
    };
    let kept = Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn: None,
        at: NOW,
    };
    let age = async |quiet| {
        home.store.session_delete_archived(&session, home.lease, quiet, NOW).await.unwrap();
        home.store.session_get(&session).await.is_ok()
    };
    home.commit(&session, vec![kept, shown(SessionState::Paused)]).await.unwrap();
    assert!(age(NOW).await, "it is not archived");
    home.commit(&session, vec![shown(SessionState::Archived)]).await.unwrap();
    assert!(age(Timestamp::from_millis(NOW.as_millis() - 1)).await, "it was used since");
    home.store.snapshot_pin(&session, home.lease, &snapshot, true).await.unwrap();
    assert!(age(NOW).await, "something of it is pinned");
    home.store.snapshot_pin(&session, home.lease, &snapshot, false).await.unwrap();
    assert!(!age(NOW).await, "nothing speaks for it any more");
}

async fn an_old_key_is_forgotten(home: Home) {
    assert_eq!(home.store.idempotency_claim("k", "r", NOW).await.unwrap(), Claim::New);
    let tomorrow = Timestamp::from_millis(NOW.as_millis() + 25 * 60 * 60 * 1000);
    assert_eq!(home.store.idempotency_claim("k", "another", tomorrow).await.unwrap(), Claim::New);
}

fn repository(name: &str) -> Repository {
    Repository {
        name: name.into(),
        url: "u".into(),
        base: None,
        secret: None,
        image: "i".into(),
        created_at: NOW,
        build: None,
    }
}

async fn names_are_unique(home: Home) {
    let store = &home.store;
    store.token_insert("h1", &token("a")).await.unwrap();
    assert!(matches!(store.token_insert("h2", &token("a")).await, Err(StoreError::Exists { .. })));
    assert!(matches!(store.token_insert("h1", &token("b")).await, Err(StoreError::Exists { .. })));
    store.repository_insert(&repository("r")).await.unwrap();
    assert!(matches!(
        store.repository_insert(&repository("r")).await,
        Err(StoreError::Exists { .. })
    ));
    let new = new_session();
    store.session_insert(home.lease, new.clone(), Vec::new()).await.unwrap();
    assert!(matches!(
        store.session_insert(home.lease, new, Vec::new()).await,
        Err(StoreError::Exists { .. })
    ));
    assert!(store.token_remove("a").await.unwrap());
    assert!(!store.token_remove("a").await.unwrap());
    assert_eq!(store.token_find("h1").await.unwrap(), None);
    let admin = Token { role: Role::Admin, ..token("admin") };
    store.token_insert("h3", &admin).await.unwrap();
    assert!(!store.token_remove("admin").await.unwrap(), "the last admin stays");
}

async fn one_build_of_a_repository_at_a_time(home: Home) {
    let (store, lease) = (&home.store, home.lease);
    store.repository_insert(&repository("r")).await.unwrap();
    let (one, two, sandbox) = (SnapshotId::random(), SnapshotId::random(), SandboxId::random());
    store.build_begin(lease, "r", &one, &sandbox, NOW).await.unwrap();
    let second = store.build_begin(lease, "r", &two, &sandbox, NOW).await;
    assert!(matches!(second, Err(StoreError::Exists { .. })));
    let build =
        Build { snapshot: one.clone(), commit: "c".into(), check: None, millis: 5, built_at: NOW };
    store.build_publish(lease, &build).await.unwrap();
    assert!(matches!(store.build_publish(lease, &build).await, Err(StoreError::NotFound { .. })));
    store.build_begin(lease, "r", &two, &sandbox, NOW).await.unwrap();
    assert_eq!(store.build_unfinished().await.unwrap(), [(two.clone(), Some(sandbox))]);
    store.build_fail(lease, &two, "no", NOW).await.unwrap();
    assert_eq!(store.repository_get("r").await.unwrap().build, Some(build));
    let (url, secret) = (repository("r").url, repository("r").secret);
    let gone = store.repository_delete("r", NOW).await.unwrap();
    assert!(gone.contains(&Removal::Copy { url, secret }), "{gone:?}");
    assert!(
        [one, two].into_iter().all(|build| gone.contains(&Removal::Snapshot(build))),
        "{gone:?}"
    );
}

async fn pages_of_sessions_neither_repeat_nor_leave_out(home: Home) {
    let mut all = Vec::new();
    for age in [1, 2, 2, 2, 3, 3, 4] {
        let new = harvest_store::NewSession { at: Timestamp::from_millis(age), ..new_session() };
        all.push((new.at, new.id.clone()));
        home.store.session_insert(home.lease, new, Vec::new()).await.unwrap();
    }
    all.sort_by_key(|(at, id)| (at.as_millis(), id.to_string()));
    all.reverse();
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let page = home.store.session_list(before.clone(), 2).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some((last.session.created_at, last.session.id.clone()));
        seen.extend(page.into_iter().map(|one| (one.session.created_at, one.session.id)));
    }
    assert_eq!(seen, all);
}

async fn names_are_ordered_by_their_bytes(home: Home) {
    for (hash, name) in ["b", "A", "a", "B", "é", "z", "Z-1", "Z 1"].iter().enumerate() {
        home.store.token_insert(&hash.to_string(), &token(name)).await.unwrap();
    }
    let names: Vec<String> =
        home.store.token_list().await.unwrap().into_iter().map(|token| token.name).collect();
    assert_eq!(names, ["A", "B", "Z 1", "Z-1", "a", "b", "z", "é"]);
}

async fn a_deleted_session_takes_everything_of_its_own_along(home: Home) {
    let (session, other) = (home.session().await, home.session().await);
    let word = || String::from("w");
    let pull = Pull {
        number: 1,
        url: word(),
        title: word(),
        body: word(),
        state: "open".into(),
        branch: word(),
        base: word(),
        commit: word(),
        evidence: None,
    };
    for id in [&session, &other] {
        let (prompt_id, turn) = (PromptId::random(), TurnId::random());
        let begin =
            Write::TurnInsert { turn: turn.clone(), number: 1, prompt: prompt_id.clone(), at: NOW };
        let kept = Write::SnapshotInsert {
            snapshot: SnapshotId::random(),
            kind: SnapshotKind::Turn,
            turn: Some(turn),
            at: NOW,
        };
        let opened =
            Write::Pull { repository: "r".to_owned(), pull: Box::new(pull.clone()), at: NOW };
        home.commit(
            id,
            vec![prompt(&prompt_id), dispatch(&prompt_id), begin, outbox(1), kept, opened],
        )
        .await
        .unwrap();
    }
    assert_eq!(
        home.store.session_delete(&session, home.lease, Vec::new(), NOW).await.unwrap().len(),
        1
    );
    for table in
        ["sessions WHERE id <> ''", "prompts", "turns", "events", "outboxes", "snapshots", "pulls"]
    {
        let left = home.kept.count(table).await;
        assert_eq!(left, if table == "events" { 2 } else { 1 }, "{table}");
    }
    assert!(matches!(home.store.session_get(&session).await, Err(StoreError::NotFound { .. })));
    home.commit(&other, vec![outbox(2)]).await.unwrap();
}

async fn a_snapshot_a_fork_uses_outlives_the_session_that_took_it(home: Home) {
    let (source, fork) = (home.session().await, home.session().await);
    let (shared, own) = (SnapshotId::random(), SnapshotId::random());
    let turn = TurnId::random();
    let keep = |snapshot: &SnapshotId, turn| Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn,
        at: NOW,
    };
    let begin =
        Write::TurnInsert { turn: turn.clone(), number: 1, prompt: PromptId::random(), at: NOW };
    home.commit(&source, vec![begin, keep(&shared, Some(turn)), keep(&own, None)]).await.unwrap();
    home.commit(&fork, vec![keep(&shared, None)]).await.unwrap();
    assert_eq!(home.store.turn_list(&source).await.unwrap()[0].snapshot, Some(shared.clone()));
    let delete = async |session| {
        home.store.session_delete(session, home.lease, Vec::new(), NOW).await.unwrap()
    };
    assert_eq!(delete(&source).await, [Removal::Snapshot(own)]);
    assert_eq!(delete(&fork).await, [Removal::Snapshot(shared)]);
}

async fn a_secret_and_a_fact_are_replaced_by_the_newer(home: Home) {
    for value in [b"one".as_slice(), b"\0\xff"] {
        home.store.secret_set("s", value, NOW).await.unwrap();
        assert_eq!(home.store.secret_get("s").await.unwrap().as_deref(), Some(value));
    }
    assert_eq!(home.store.secret_list().await.unwrap(), ["s"]);
    assert!(home.store.secret_remove("s").await.unwrap());
    assert_eq!(home.store.secret_get("s").await.unwrap(), None);
    for value in ["one", "two"] {
        home.store.meta_set("k", value).await.unwrap();
        assert_eq!(home.store.meta_get("k").await.unwrap().as_deref(), Some(value));
    }
}
