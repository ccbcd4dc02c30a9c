//! Databases with invalid content or another schema version.

use harvest_proto::{
    EventBody, Hint, PromptId, RepositoryName, SnapshotId, TurnId,
    api::DiffStat,
    event::{SnapshotKind, Usage},
};
use harvest_store::{Removal, SessionFilter, Store, StoreError, Write};

use crate::test_store::{NOW, TestDatabase, TestStore, dispatch, on_both, prompt, token, warning};

on_both! {
    invalid_row_names_its_column,
    damaged_row_is_left_out_of_lists,
    damaged_session_does_not_end_paging,
    damaged_session_can_be_deleted,
    claimed_numbers_never_overflow_sums,
    database_with_other_version_is_refused,
}

async fn invalid_row_names_its_column(test: TestStore) {
    let (good, bad) = (test.session().await, test.session().await);
    test.commit(&good, vec![warning("fine")]).await.unwrap();
    test.commit(&bad, vec![warning("one"), warning("two")]).await.unwrap();
    test.database
        .sql(&format!("UPDATE events SET body = 'not json' WHERE session = '{bad}' AND seq = 2"))
        .await;
    let events = test.store.event_list(&bad, 0, 10).await.unwrap();
    let [one, two] = &events[..] else { panic!("{events:?}") };
    assert_eq!((one.seq, two.seq), (1, 2), "the damaged event keeps its number");
    let EventBody::Warning { message } = &two.body else { panic!("{two:?}") };
    assert!(message.contains("event 2 is damaged"), "{message}");
    for (change, column) in [
        ("state = 'no such state'", "state"),
        ("state = 'idle', epoch = -1", "epoch"),
        ("epoch = 0, snapshot = 'no id'", "snapshot"),
    ] {
        test.database.sql(&format!("UPDATE sessions SET {change} WHERE id = '{bad}'")).await;
        let read = test.store.session_get(&bad).await;
        assert!(
            matches!(read, Err(StoreError::Corrupt { column: named }) if named == column),
            "{read:?}"
        );
    }
    assert_eq!(test.seqs(&good).await, [1]);
    assert_eq!(test.commit(&bad, vec![warning("still works")]).await.unwrap(), 3);
}

/// One row of every table that a list reads, and the same list after the row was damaged.
async fn damaged_row_is_left_out_of_lists(test: TestStore) {
    let store = &test.store;
    let session = test.session().await;
    let (prompt_id, turn) = (PromptId::random(), TurnId::random());
    let (snapshot, repository): (_, RepositoryName) =
        (SnapshotId::random(), "o/r".parse().unwrap());
    let stat = DiffStat { files: 1, insertions: 1, deletions: 1 };
    test.commit(
        &session,
        vec![
            prompt(&prompt_id),
            dispatch(&prompt_id),
            Write::TurnInsert { turn: turn.clone(), number: 1, prompt: prompt_id, at: NOW },
            Write::TurnTree { turn: turn.clone(), after: 0, repository, tree: "t".into(), stat },
            Write::SnapshotInsert {
                snapshot: snapshot.clone(),
                kind: SnapshotKind::Turn,
                turn: Some(turn),
                at: NOW,
            },
        ],
    )
    .await
    .unwrap();
    store.token_insert("hash", &token("laptop")).await.unwrap();
    store.removal_add(test.lease, vec![Removal::Snapshot(snapshot)], NOW).await.unwrap();
    let counts = async || {
        [
            store.prompt_list(&session).await.unwrap().len(),
            store.turn_list(&session).await.unwrap().len(),
            store.tree_list(&session).await.unwrap().len(),
            store.snapshot_list(&session).await.unwrap().len(),
            store.snapshot_all().await.unwrap().len(),
            store.token_list().await.unwrap().len(),
            store.removal_list().await.unwrap().len(),
            store.session_get(&session).await.unwrap().checkouts.len(),
        ]
    };
    assert_eq!(counts().await, [1, 1, 1, 1, 1, 1, 1, 2]);
    for damage in [
        "UPDATE prompts SET status = 'x'",
        "UPDATE turns SET outcome = 'x'",
        "UPDATE turn_trees SET repository = ''",
        "UPDATE snapshots SET kind = 'x'",
        "UPDATE tokens SET role = 'x'",
        "UPDATE removals SET id = 'x'",
        "UPDATE checkouts SET folder = '/' WHERE position = 1",
    ] {
        test.database.sql(damage).await;
    }
    assert_eq!(counts().await, [0, 0, 0, 0, 0, 0, 0, 1]);
}

async fn damaged_session_does_not_end_paging(test: TestStore) {
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(test.session().await);
    }
    for bad in [&all[1], &all[4]] {
        test.database.sql(&format!("UPDATE sessions SET state = 'x' WHERE id = '{bad}'")).await;
    }
    let (mut seen, mut states) = (Vec::new(), 0);
    let (mut before, filter) = (None, SessionFilter::default());
    loop {
        let page = test.store.session_find(&filter, before, 1).await.unwrap();
        seen.extend(page.records.into_iter().map(|record| record.session.id));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    seen.sort_by_key(|id| all.iter().position(|one| one == id));
    assert_eq!(seen, [all[0].clone(), all[2].clone(), all[3].clone()]);
    test.store.session_each_state(|_| states += 1).await.unwrap();
    assert_eq!(states, 5, "the states of damaged sessions are still read");
}

async fn damaged_session_can_be_deleted(test: TestStore) {
    let session = test.session().await;
    let snapshot = SnapshotId::random();
    let (kind, turn) = (SnapshotKind::Pause, None);
    let taken = Write::SnapshotInsert { snapshot: snapshot.clone(), kind, turn, at: NOW };
    test.commit(&session, vec![taken]).await.unwrap();
    test.database.sql("UPDATE sessions SET sandbox = 'no id', state = 'x'").await;
    test.database
        .sql(&format!(
            "INSERT INTO snapshots (id, session, kind, created_at) VALUES ('no id', '{session}', 'x', 1)"
        ))
        .await;
    let removals = test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    assert_eq!(removals, [Removal::Snapshot(snapshot)]);
    assert!(!test.store.session_exists(&session).await.unwrap());
}

async fn claimed_numbers_never_overflow_sums(test: TestStore) {
    let session = test.session().await;
    let (prompt_id, turn) = (PromptId::random(), TurnId::random());
    let most = u64::MAX;
    let usage = Usage {
        input_tokens: most,
        output_tokens: most,
        cache_read_tokens: most,
        cache_write_tokens: most,
    };
    let stat = DiffStat { files: most, insertions: most, deletions: most };
    let number = 1;
    let started =
        Write::TurnInsert { turn: turn.clone(), number, prompt: prompt_id.clone(), at: NOW };
    let tree = |repository: &str| Write::TurnTree {
        turn: turn.clone(),
        after: 0,
        repository: repository.parse().unwrap(),
        tree: "t".into(),
        stat,
    };
    let trees = [tree("o/r"), tree("o/s")];
    let writes = [prompt(&prompt_id), dispatch(&prompt_id), started].into_iter().chain(trees);
    test.commit(&session, writes.collect()).await.unwrap();
    for _ in 0..3 {
        test.spend(&session, usage, 0).await;
    }
    let found = test.store.session_find(&SessionFilter::default(), None, 10).await.unwrap();
    let shown = found.records[0].session.usage;
    assert_eq!(shown.input_tokens, shown.cache_write_tokens);
    assert!(shown.input_tokens > 1_u64 << 40, "the sum stays at its limit");
    let turns = test.store.turn_list(&session).await.unwrap();
    assert_eq!(turns[0].usage, shown);
    assert!(turns[0].diff.unwrap().files > 1_u64 << 40);
}

/// Only SQLite stores bytes in a text column.
#[tokio::test]
async fn blob_in_text_column_is_reported() {
    let test = TestStore::sqlite().await;
    let session = test.session().await;
    test.database.sql(&format!("UPDATE sessions SET title = x'ff00' WHERE id = '{session}'")).await;
    let read = test.store.session_get(&session).await;
    assert!(matches!(read, Err(StoreError::Corrupt { column: "title" })), "{read:?}");
}

#[tokio::test]
async fn file_that_is_not_a_database_is_kept() {
    let database = TestDatabase::sqlite();
    std::fs::write(database.file(), "notes of a user, long enough not to be an empty file")
        .unwrap();
    assert!(Store::open(&database.file()).await.is_err());
    assert!(std::fs::read_to_string(database.file()).unwrap().starts_with("notes of a user"));
}

async fn database_with_other_version_is_refused(test: TestStore) {
    test.store.close().await;
    test.database.sql("INSERT INTO schema_version (version) VALUES (1000)").await;
    let opened = Store::connect(&test.database.url()).await;
    let Err(error @ StoreError::OtherVersion { found: 1000, .. }) = opened else {
        panic!("{opened:?}")
    };
    assert!(error.hint().is_some());
}

#[tokio::test]
async fn copy_of_a_database_in_use_is_complete() {
    let test = TestStore::sqlite().await;
    let session = test.session().await;
    test.commit(&session, vec![warning("before")]).await.unwrap();
    let copy = TestDatabase::sqlite();
    let (from, into) = (test.database.file(), copy.file());
    let (version, written) = tokio::join!(
        harvest_store::copy_database(&from, &into),
        test.commit(&session, vec![warning("meanwhile")]),
    );
    written.unwrap();
    assert_eq!(version.unwrap(), harvest_store::SCHEMA_VERSION);
    test.commit(&session, vec![warning("after")]).await.unwrap();
    let events = copy.store().await.event_list(&session, 0, 10).await.unwrap();
    assert!((1..=2).contains(&events.len()), "{events:?}");
    let again = harvest_store::copy_database(&from, &into).await;
    assert!(again.is_err(), "a copy never replaces a database");
}
