//! What the store does with what it did not write, or wrote long ago.

use harvest_proto::SessionId;
use harvest_store::{Store, StoreError};

use crate::home::{Home, Kept, on_both, warning};

on_both! {
    a_row_that_makes_no_sense_is_named_and_harms_no_other,
    a_store_of_a_newer_version_is_left_alone,
}

async fn a_row_that_makes_no_sense_is_named_and_harms_no_other(home: Home) {
    let (good, bad) = (home.session().await, home.session().await);
    home.commit(&good, vec![warning("fine")]).await.unwrap();
    home.commit(&bad, vec![warning("one"), warning("two")]).await.unwrap();
    home.kept
        .sql(&format!("UPDATE events SET body = 'not json' WHERE session = '{bad}' AND seq = 2"))
        .await;
    let events = home.store.event_list(&bad, 0, 10).await;
    assert!(matches!(events, Err(StoreError::Corrupt { column: "body" })), "{events:?}");
    assert_eq!(home.store.event_list(&bad, 0, 1).await.unwrap().len(), 1);
    for (change, column) in [
        ("state = 'no such state'", "state"),
        ("state = 'idle', epoch = -1", "epoch"),
        ("epoch = 0, snapshot = 'no id'", "snapshot"),
    ] {
        home.kept.sql(&format!("UPDATE sessions SET {change} WHERE id = '{bad}'")).await;
        let read = home.store.session_get(&bad).await;
        assert!(
            matches!(read, Err(StoreError::Corrupt { column: named }) if named == column),
            "{read:?}"
        );
    }
    assert_eq!(home.seqs(&good).await, [1]);
    assert_eq!(home.commit(&bad, vec![warning("goes on")]).await.unwrap(), 3);
}

/// SQLite keeps whatever it is given; PostgreSQL would not take this.
#[tokio::test]
async fn bytes_where_a_text_should_be_are_named() {
    let home = Home::sqlite().await;
    let session = home.session().await;
    home.kept.sql(&format!("UPDATE sessions SET title = x'ff00' WHERE id = '{session}'")).await;
    let read = home.store.session_get(&session).await;
    assert!(matches!(read, Err(StoreError::Corrupt { column: "title" })), "{read:?}");
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused_and_kept() {
    let kept = Kept::sqlite();
    std::fs::write(kept.file(), "somebody's notes, long enough to be no empty file").unwrap();
    assert!(Store::open(&kept.file()).await.is_err());
    assert!(std::fs::read_to_string(kept.file()).unwrap().starts_with("somebody's notes"));
}

async fn a_store_of_a_newer_version_is_left_alone(home: Home) {
    home.store.close().await;
    home.kept.sql("INSERT INTO schema_version (version) VALUES (1000)").await;
    let opened = Store::connect(&home.kept.url()).await;
    assert!(matches!(opened, Err(StoreError::TooNew { found: 1000, .. })), "{opened:?}");
}

/// As the first version made it.
async fn an_old_store_is_brought_up_to_date(kept: Kept) {
    let (schema, session) = (include_str!("../../src/schema/0001.sql"), SessionId::random());
    kept.sql(&format!(
        "{schema}
         CREATE TABLE schema_version (version BIGINT NOT NULL);
         INSERT INTO schema_version (version) VALUES (1);
         INSERT INTO leases (name, number, taken_at) VALUES ('server', 7, 1);
         INSERT INTO sessions (id, title, state, reason, repository, branch, agent, network, author_name,
           author_email, conversation, drive, diff, next_seq, created_at, last_activity)
         VALUES ('{session}', 'old', 'idle', 'created', 'r', 'b', 'claude', 'trusted', 'Ada', 'a@b', 'c', '', '+1', 3, 1, 1);
         INSERT INTO events (session, seq, at, body) VALUES
           ('{session}', 1, 1, '{{\"type\":\"warning\",\"message\":\"m\"}}'),
           ('{session}', 2, 1, '{{\"type\":\"warning\",\"message\":\"m\"}}');"
    ))
    .await;
    let home = Home::at(kept).await;
    assert_eq!(home.lease.0, 8);
    assert_eq!(home.store.session_get(&session).await.unwrap().session.title, "old");
    assert_eq!(home.store.session_diff(&session).await.unwrap().as_deref(), Some("+1"));
    assert_eq!(home.commit(&session, vec![warning("new")]).await.unwrap(), 3);
    assert_eq!(home.seqs(&session).await, [1, 2, 3]);
}

#[tokio::test]
async fn an_old_file_is_brought_up_to_date() {
    an_old_store_is_brought_up_to_date(Kept::sqlite()).await;
}

#[tokio::test]
async fn an_old_database_is_brought_up_to_date() {
    an_old_store_is_brought_up_to_date(Kept::postgres()).await;
}
