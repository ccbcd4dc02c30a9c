//! Databases with invalid content or another schema version.

use harvest_proto::Hint;
use harvest_store::{Store, StoreError};

use crate::test_store::{TestDatabase, TestStore, on_both, warning};

on_both! {
    invalid_row_names_its_column,
    database_with_other_version_is_refused,
}

async fn invalid_row_names_its_column(test: TestStore) {
    let (good, bad) = (test.session().await, test.session().await);
    test.commit(&good, vec![warning("fine")]).await.unwrap();
    test.commit(&bad, vec![warning("one"), warning("two")]).await.unwrap();
    test.database
        .sql(&format!("UPDATE events SET body = 'not json' WHERE session = '{bad}' AND seq = 2"))
        .await;
    let events = test.store.event_list(&bad, 0, 10).await;
    assert!(matches!(events, Err(StoreError::Corrupt { column: "body" })), "{events:?}");
    assert_eq!(test.store.event_list(&bad, 0, 1).await.unwrap().len(), 1);
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
