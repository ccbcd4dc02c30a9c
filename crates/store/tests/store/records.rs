//! Unique names, idempotency keys, ordered and paged lists, cascading deletes.

use harvest_proto::{
    PromptId, SecretOwner, SecretScope, SessionId, SnapshotId, StateReason, Timestamp, TurnId,
    api::{
        Build, BuildStatus, PullRequest, PullRequestState, Repository, Role, SessionState, Token,
    },
    event::{SnapshotKind, Usage},
};
use harvest_store::{
    Claim, DriverState, NewSecretUse, Removal, SealedSecret, SecretBinding, SessionFilter,
    StoreError, Write,
};

use crate::test_store::{NOW, TestStore, dispatch, new_session, on_both, outbox, prompt, token};

on_both! {
    idempotency_key_replays_the_first_response,
    one_of_many_concurrent_claims_wins,
    created_ids_survive_a_missing_response,
    key_of_forks_outlives_all_but_the_last,
    idempotency_key_expires,
    names_are_unique,
    one_build_per_repository_at_a_time,
    builds_of_branches_are_kept_apart,
    sessions_list_repositories_with_newest_builds,
    narrow_reads_agree_with_the_session,
    session_pages_cover_all_sessions_once,
    names_are_ordered_by_bytes,
    deleting_a_session_deletes_all_its_rows,
    snapshot_used_by_fork_outlives_its_session,
    only_expired_archived_sessions_are_deleted,
    narrowest_secret_wins_until_its_session_ends,
    secrets_and_meta_values_are_replaced,
    busy_session_forgets_only_its_own_uses,
}

async fn idempotency_key_replays_the_first_response(test: TestStore) {
    let claim =
        async |request: &str| test.store.idempotency_claim("k", request, NOW).await.unwrap();
    assert_eq!(claim("a").await, Claim::New);
    assert_eq!(claim("a").await, Claim::InFlight);
    test.store.idempotency_finish("k", "response").await.unwrap();
    assert_eq!(claim("a").await, Claim::Done { response: "response".into() });
    assert_eq!(claim("b").await, Claim::Mismatch);
    test.store.idempotency_release("k").await.unwrap();
    assert_eq!(
        claim("a").await,
        Claim::Done { response: "response".into() },
        "a finished key is not released"
    );
    assert_eq!(test.store.idempotency_claim("l", "a", NOW).await.unwrap(), Claim::New);
    test.store.idempotency_release_all().await.unwrap();
    assert_eq!(test.store.idempotency_claim("l", "a", NOW).await.unwrap(), Claim::New);
}

async fn created_ids_survive_a_missing_response(test: TestStore) {
    let claim = async || test.store.idempotency_claim("k", "a", NOW).await.unwrap();
    let session = test.session().await;
    assert_eq!(claim().await, Claim::New);
    let created = |id: &str| Write::CreatedId { key: "k".into(), id: id.into() };
    // Not recorded by a commit that fails.
    let unknown = Write::SnapshotShare { snapshot: SnapshotId::random(), at: NOW };
    test.commit(&session, vec![created("prm_0"), unknown]).await.unwrap_err();
    assert_eq!(claim().await, Claim::InFlight);
    // Recorded by one that succeeds; releasing the key does not remove the ids.
    test.commit(&session, vec![created("ses_1"), created("ses_2")]).await.unwrap();
    test.store.idempotency_release_all().await.unwrap();
    test.store.idempotency_release("k").await.unwrap();
    assert_eq!(claim().await, Claim::CreatedIds { ids: vec!["ses_1".into(), "ses_2".into()] });
    test.store.idempotency_finish("k", "response").await.unwrap();
    assert_eq!(claim().await, Claim::Done { response: "response".into() });
}

async fn key_of_forks_outlives_all_but_the_last(test: TestStore) {
    let claim = async || test.store.idempotency_claim("k", "a", NOW).await.unwrap();
    let forks = [test.session().await, test.session().await, test.session().await];
    assert_eq!(claim().await, Claim::New);
    for fork in &forks {
        let created = Write::CreatedId { key: "k".into(), id: fork.to_string() };
        test.commit(fork, vec![created]).await.unwrap();
    }
    let ids = |forks: &[SessionId]| forks.iter().map(ToString::to_string).collect::<Vec<_>>();
    let [first, second, third] = forks.clone();
    for (deleted, left) in [(&second, vec![first.clone(), third.clone()]), (&first, vec![third])] {
        test.store.session_delete(deleted, test.lease, Vec::new(), NOW).await.unwrap();
        assert_eq!(claim().await, Claim::CreatedIds { ids: ids(&left) });
    }
    test.store.session_delete(&forks[2], test.lease, Vec::new(), NOW).await.unwrap();
    assert_eq!(claim().await, Claim::New);
}

async fn one_of_many_concurrent_claims_wins(test: TestStore) {
    let all: Vec<_> = (0..50)
        .map(|_| {
            let store = test.store.clone();
            tokio::spawn(async move { store.idempotency_claim("k", "r", NOW).await.unwrap() })
        })
        .collect();
    let mut new = 0;
    for claim in all {
        match claim.await.unwrap() {
            Claim::New => new += 1,
            Claim::InFlight => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(new, 1);
}

async fn only_expired_archived_sessions_are_deleted(test: TestStore) {
    let (session, snapshot) = (test.session().await, SnapshotId::random());
    let driver_state = |state| {
        Write::DriverState(DriverState {
            json: String::new(),
            state,
            reason: StateReason::Created,
            sandbox: None,
            epoch: 0,
            snapshot: None,
            resting: false,
        })
    };
    let taken = Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn: None,
        at: NOW,
    };
    let age = async |quiet| {
        test.store.session_delete_archived(&session, test.lease, quiet, NOW).await.unwrap();
        test.store.session_get(&session).await.is_ok()
    };
    test.commit(&session, vec![taken, driver_state(SessionState::Paused)]).await.unwrap();
    assert!(age(NOW).await, "not archived");
    test.commit(&session, vec![driver_state(SessionState::Archived)]).await.unwrap();
    assert!(age(Timestamp::from_millis(NOW.as_millis() - 1)).await, "used since");
    test.store.snapshot_pin(&session, test.lease, &snapshot, true).await.unwrap();
    assert!(age(NOW).await, "has a pinned snapshot");
    test.store.snapshot_pin(&session, test.lease, &snapshot, false).await.unwrap();
    assert!(!age(NOW).await, "expired");
}

async fn idempotency_key_expires(test: TestStore) {
    assert_eq!(test.store.idempotency_claim("k", "r", NOW).await.unwrap(), Claim::New);
    let tomorrow = Timestamp::from_millis(NOW.as_millis() + 25 * 60 * 60 * 1000);
    assert_eq!(test.store.idempotency_claim("k", "another", tomorrow).await.unwrap(), Claim::New);
}

fn repository(name: &str) -> Repository {
    Repository {
        name: name.parse().unwrap(),
        url: "u".into(),
        base: None,
        secret: None,
        image: Some("i".into()),
        created_at: NOW,
        build: None,
    }
}

async fn names_are_unique(test: TestStore) {
    let store = &test.store;
    store.token_insert("h1", &token("a")).await.unwrap();
    assert!(matches!(store.token_insert("h2", &token("a")).await, Err(StoreError::Exists { .. })));
    assert!(matches!(store.token_insert("h1", &token("b")).await, Err(StoreError::Exists { .. })));
    store.repository_insert(&repository("o/r")).await.unwrap();
    assert!(matches!(
        store.repository_insert(&repository("o/r")).await,
        Err(StoreError::Exists { .. })
    ));
    let new = new_session();
    store.session_insert_all(test.lease, vec![(new.clone(), Vec::new())]).await.unwrap();
    assert!(matches!(
        store.session_insert_all(test.lease, vec![(new, Vec::new())]).await,
        Err(StoreError::Exists { .. })
    ));
    assert!(store.token_remove("a").await.unwrap());
    assert!(!store.token_remove("a").await.unwrap());
    assert_eq!(store.token_find("h1").await.unwrap(), None);
    let admin = Token { role: Role::Admin, ..token("admin") };
    store.token_insert("h3", &admin).await.unwrap();
    assert!(!store.token_remove("admin").await.unwrap(), "the last admin token stays");
}

async fn one_build_per_repository_at_a_time(test: TestStore) {
    let (store, lease) = (&test.store, test.lease);
    store.repository_insert(&repository("o/r")).await.unwrap();
    let (one, two) = (SnapshotId::random(), SnapshotId::random());
    let name = &"o/r".parse().unwrap();
    store.build_begin(lease, (name, None), &one, ("local", None), NOW).await.unwrap();
    let second = store.build_begin(lease, (name, None), &two, ("local", None), NOW).await;
    assert!(matches!(second, Err(StoreError::Exists { .. })));
    let build = Build {
        snapshot_id: one.clone(),
        provider: "local".into(),
        commit: "c".into(),
        config: None,
        branch: None,
        image: "agents".into(),
        image_id: None,
        layers: 1,
        package_manager: Some("npm".into()),
        check: None,
        millis: 5,
        built_at: NOW,
    };
    store.build_publish(lease, &build, "log").await.unwrap();
    assert!(matches!(
        store.build_publish(lease, &build, "").await,
        Err(StoreError::NotFound { .. })
    ));
    store.build_begin(lease, (name, None), &two, ("local", None), NOW).await.unwrap();
    assert_eq!(store.build_unfinished().await.unwrap(), std::slice::from_ref(&two));
    store.build_fail(lease, &two, ("no", "npm ci"), NOW).await.unwrap();
    let log = store.build_log(name, &two).await.unwrap();
    assert_eq!((log.log.as_str(), log.build.status), ("npm ci", BuildStatus::Failed));
    assert_eq!((log.build.error.as_deref(), log.build.millis), (Some("no"), None));
    let kept = store.build_list(name).await.unwrap();
    assert!(kept.iter().any(|build| build.snapshot_id == one && build.commit.is_some()));
    assert_eq!(kept.len(), 2);
    assert_eq!(store.repository_get(name).await.unwrap().build, Some(build));
    let (url, secret) = (repository("o/r").url, repository("o/r").secret);
    let gone = store.repository_delete(name, NOW).await.unwrap();
    assert!(gone.contains(&Removal::ForgeCopy { url, secret }), "{gone:?}");
    assert!(
        [one, two].into_iter().all(|build| gone.contains(&Removal::Snapshot(build))),
        "{gone:?}"
    );
}

async fn builds_of_branches_are_kept_apart(test: TestStore) {
    let (store, lease) = (&test.store, test.lease);
    store.repository_insert(&repository("o/r")).await.unwrap();
    let name = &"o/r".parse().unwrap();
    let next: harvest_proto::BranchName = "next".parse().unwrap();
    for (branch, commit) in [(None, "base"), (Some(&next), "of next")] {
        let snapshot = SnapshotId::random();
        store.build_begin(lease, (name, branch), &snapshot, ("local", None), NOW).await.unwrap();
        let build = Build {
            snapshot_id: snapshot,
            provider: "local".into(),
            commit: commit.into(),
            config: None,
            branch: branch.cloned(),
            image: "agents".into(),
            image_id: None,
            layers: 3,
            package_manager: None,
            check: None,
            millis: 5,
            built_at: NOW,
        };
        store.build_publish(lease, &build, "").await.unwrap();
        assert_eq!(store.build_newest(name, branch).await.unwrap(), Some(build));
    }
    let other = "other".parse().unwrap();
    assert_eq!(store.build_newest(name, Some(&other)).await.unwrap(), None);
    let newest = store.repository_get(name).await.unwrap().build.unwrap();
    assert_eq!(newest.commit, "base", "sessions without a branch start from the base");
    let listed = store.build_list(name).await.unwrap();
    assert_eq!(listed.iter().filter(|build| build.branch == Some(next.clone())).count(), 1);
}

async fn sessions_list_repositories_with_newest_builds(test: TestStore) {
    let (store, lease) = (&test.store, test.lease);
    for name in ["o/s", "o/r", "o/other"] {
        store.repository_insert(&repository(name)).await.unwrap();
    }
    let session = test.session().await;
    let mut newest = None;
    for (name, commit, at) in [("o/s", "old", 1), ("o/s", "new", 2), ("o/other", "x", 3)] {
        let (snapshot, built_at) = (SnapshotId::random(), Timestamp::from_millis(at));
        store
            .build_begin(lease, (&name.parse().unwrap(), None), &snapshot, ("local", None), NOW)
            .await
            .unwrap();
        let build = Build {
            snapshot_id: snapshot,
            provider: "local".into(),
            commit: commit.into(),
            config: None,
            branch: None,
            image: "agents".into(),
            image_id: None,
            layers: 1,
            package_manager: None,
            check: None,
            millis: 5,
            built_at,
        };
        store.build_publish(lease, &build, "").await.unwrap();
        newest = if name == "o/s" { Some(build) } else { newest };
    }
    let built = Repository { build: newest, ..repository("o/s") };
    assert_eq!(
        store.repository_list_of(&session).await.unwrap(),
        [repository("o/r"), built.clone()],
        "the primary repository comes first"
    );
    assert_eq!(store.repository_list().await.unwrap()[1..], [repository("o/r"), built]);
    assert!(store.repository_list_of(&SessionId::random()).await.unwrap().is_empty());
}

async fn narrow_reads_agree_with_the_session(test: TestStore) {
    let (store, session) = (&test.store, test.session().await);
    let usage = Usage { input_tokens: 3, cache_write_tokens: 7, ..Usage::default() };
    test.spend(&session, usage, 7).await;
    let whole = store.session_get(&session).await.unwrap().session;
    assert!(store.session_exists(&session).await.unwrap());
    assert_eq!(store.session_author(&session).await.unwrap(), whole.author);
    assert_eq!((whole.usage, whole.spent_micros.micros()), (usage, 7));
    let unknown = SessionId::random();
    assert!(!store.session_exists(&unknown).await.unwrap());
    assert!(matches!(store.session_author(&unknown).await, Err(StoreError::NotFound { .. })));
}

async fn session_pages_cover_all_sessions_once(test: TestStore) {
    let mut all = Vec::new();
    for age in [1, 2, 2, 2, 3, 3, 4] {
        let new = harvest_store::NewSession { at: Timestamp::from_millis(age), ..new_session() };
        all.push((new.at, new.id.clone()));
        test.store.session_insert_all(test.lease, vec![(new, Vec::new())]).await.unwrap();
    }
    all.sort_by_key(|(at, id)| (at.as_millis(), id.to_string()));
    all.reverse();
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let page = test.store.session_find(&SessionFilter::default(), before, 2).await.unwrap();
        seen.extend(page.records.into_iter().map(|one| (one.session.created_at, one.session.id)));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(seen, all);
}

async fn names_are_ordered_by_bytes(test: TestStore) {
    for (hash, name) in ["b", "A", "a", "B", "é", "z", "Z-1", "Z 1"].iter().enumerate() {
        test.store.token_insert(&hash.to_string(), &token(name)).await.unwrap();
    }
    let names: Vec<String> =
        test.store.token_list().await.unwrap().into_iter().map(|token| token.name).collect();
    assert_eq!(names, ["A", "B", "Z 1", "Z-1", "a", "b", "z", "é"]);
}

async fn deleting_a_session_deletes_all_its_rows(test: TestStore) {
    let (session, other) = (test.session().await, test.session().await);
    let word = || String::from("w");
    let pull_request = PullRequest {
        number: 1,
        url: word(),
        title: word(),
        body: word(),
        state: PullRequestState::Open,
        draft: false,
        branch: "b".parse().unwrap(),
        base: "main".parse().unwrap(),
        commit: word(),
        evidence: None,
    };
    for id in [&session, &other] {
        let (prompt_id, turn) = (PromptId::random(), TurnId::random());
        let begin =
            Write::TurnInsert { turn: turn.clone(), number: 1, prompt: prompt_id.clone(), at: NOW };
        let taken = Write::SnapshotInsert {
            snapshot: SnapshotId::random(),
            kind: SnapshotKind::Turn,
            turn: Some(turn),
            at: NOW,
        };
        let opened = Write::PullRequest {
            repository: "o/r".parse().unwrap(),
            pull_request: Box::new(pull_request.clone()),
        };
        test.commit(
            id,
            vec![prompt(&prompt_id), dispatch(&prompt_id), begin, outbox(1), taken, opened],
        )
        .await
        .unwrap();
    }
    assert_eq!(
        test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap().len(),
        1
    );
    for table in [
        "sessions WHERE id <> ''",
        "prompts",
        "turns",
        "events",
        "outboxes",
        "snapshots",
        "pull_requests",
    ] {
        let left = test.database.count(table).await;
        assert_eq!(left, if table == "events" { 2 } else { 1 }, "{table}");
    }
    assert!(matches!(test.store.session_get(&session).await, Err(StoreError::NotFound { .. })));
    test.commit(&other, vec![outbox(2)]).await.unwrap();
}

async fn snapshot_used_by_fork_outlives_its_session(test: TestStore) {
    let (source, fork) = (test.session().await, test.session().await);
    let (shared, own) = (SnapshotId::random(), SnapshotId::random());
    let turn = TurnId::random();
    let insert = |snapshot: &SnapshotId, turn| Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn,
        at: NOW,
    };
    let begin =
        Write::TurnInsert { turn: turn.clone(), number: 1, prompt: PromptId::random(), at: NOW };
    test.commit(&source, vec![begin, insert(&shared, Some(turn)), insert(&own, None)])
        .await
        .unwrap();
    test.commit(&fork, vec![insert(&shared, None)]).await.unwrap();
    assert_eq!(test.store.turn_list(&source).await.unwrap()[0].snapshot_id, Some(shared.clone()));
    let delete = async |session| {
        test.store.session_delete(session, test.lease, Vec::new(), NOW).await.unwrap()
    };
    assert_eq!(delete(&source).await, [Removal::Snapshot(own)]);
    assert_eq!(delete(&fork).await, [Removal::Snapshot(shared)]);
}

fn secret(owner: SecretOwner, name: &str, value: &[u8]) -> SealedSecret {
    let (name, sealed) = (name.to_owned(), value.to_vec());
    SealedSecret { owner, name, sealed, binding: None, updated_at: NOW }
}

async fn narrowest_secret_wins_until_its_session_ends(test: TestStore) {
    let (session, name) = (test.session().await, "o/r".parse().unwrap());
    test.store.repository_insert(&repository("o/r")).await.unwrap();
    let owners = [
        SecretOwner::Session(session.clone()),
        SecretOwner::Repository(name),
        SecretOwner::user("Ada@example.org"),
        SecretOwner::Global,
    ];
    let binding = SecretBinding { hosts: vec!["a.org".into()], header: "X-Key: {}".into() };
    for owner in &owners {
        let binding = Some(binding.clone());
        let one = SealedSecret { binding, ..secret(owner.clone(), "s", b"v") };
        test.store.secret_set(one).await.unwrap();
    }
    // Another value keeps its hosts.
    test.store.secret_set(secret(owners[0].clone(), "s", b"w")).await.unwrap();
    test.store.secret_set(secret(SecretOwner::Global, "t", b"t")).await.unwrap();
    let effective = test.store.secrets_of(&owners).await.unwrap();
    let values: Vec<_> = effective.iter().map(|one| one.sealed.as_slice()).collect();
    assert_eq!(values, [b"w", b"t"]);
    assert_eq!(effective[0].hosts(), ["a.org"]);
    for at in 0..owners.len() {
        let found = test.store.secret_find(&owners[at..], "s").await.unwrap().unwrap();
        assert_eq!(found.owner, owners[at]);
    }
    assert_eq!(test.store.secret_find(&owners[2..3], "t").await.unwrap(), None);
    let one = NewSecretUse {
        name: "s".into(),
        scope: SecretScope::Session,
        session: session.clone(),
        host: "a.org".into(),
        method: "GET".into(),
        path: "/".into(),
        at: NOW,
    };
    let of_build = NewSecretUse { session: SessionId::random(), ..one.clone() };
    test.store.secret_uses_add(vec![one, of_build]).await.unwrap();
    let uses = test.store.secret_uses("s").await.unwrap();
    let sessions: Vec<_> = uses.into_iter().map(|one| one.session).collect();
    assert_eq!(sessions, [None, Some(session.clone())]);
    test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    assert_eq!(test.store.secret_find(&owners[..1], "s").await.unwrap(), None);
    assert_eq!(test.store.secret_uses("s").await.unwrap().len(), 1);
    test.store.repository_delete(&"o/r".parse().unwrap(), NOW).await.unwrap();
    assert_eq!(test.store.secret_find(&owners[1..2], "s").await.unwrap(), None);
}

async fn busy_session_forgets_only_its_own_uses(test: TestStore) {
    let (quiet, busy) = (test.session().await, test.session().await);
    let of = |session: &SessionId| NewSecretUse {
        name: "s".into(),
        scope: SecretScope::Global,
        session: session.clone(),
        host: "a.org".into(),
        method: "GET".into(),
        path: "/".into(),
        at: NOW,
    };
    let build = SessionId::random();
    test.store.secret_uses_add(vec![of(&quiet), of(&build)]).await.unwrap();
    test.store.secret_uses_add(vec![of(&busy); 1010]).await.unwrap();
    // More than one answer names: those of the others are the oldest.
    let count = async || {
        let uses = test.store.secret_uses("s").await.unwrap();
        uses.iter().filter(|one| one.session.as_ref() == Some(&busy)).count()
    };
    assert_eq!(count().await, 1000);
    test.store.session_delete(&busy, test.lease, Vec::new(), NOW).await.unwrap();
    let uses = test.store.secret_uses("s").await.unwrap();
    let sessions: Vec<_> = uses.into_iter().map(|one| one.session).collect();
    assert_eq!(sessions, [None, Some(quiet)]);
}

async fn secrets_and_meta_values_are_replaced(test: TestStore) {
    let global = [SecretOwner::Global];
    for value in [b"one".as_slice(), b"\0\xff"] {
        test.store.secret_set(secret(SecretOwner::Global, "s", value)).await.unwrap();
        let found = test.store.secret_find(&global, "s").await.unwrap();
        assert_eq!(found.map(|found| found.sealed).as_deref(), Some(value));
    }
    assert_eq!(test.store.secret_list().await.unwrap().len(), 1);
    assert!(test.store.secret_remove(&SecretOwner::Global, "s").await.unwrap());
    assert_eq!(test.store.secret_find(&global, "s").await.unwrap(), None);
    for value in ["one", "two"] {
        test.store.meta_set("k", value).await.unwrap();
        assert_eq!(test.store.meta_get("k").await.unwrap().as_deref(), Some(value));
    }
}
