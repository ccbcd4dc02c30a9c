//! What an operation reads does not grow with the number of sessions: PostgreSQL counts the rows.
//! For SQLite, `requests_and_starts_scan_no_table` of the session crate examines the query plans.

use std::collections::BTreeMap;

use harvest_proto::{SessionId, SnapshotId, StateReason, api::SessionState, event::SnapshotKind};
use harvest_store::{DriverState, NewSession, SessionFilter, Write};
use sqlx::Row;

use crate::test_store::{NOW, TestDatabase, TestStore, new_session, prompt, warning};

const KEPT: usize = 300;

// An operation reads a few rows of each table.
const MOST_ROWS: i64 = 100;

fn kept() -> (NewSession, Vec<Write>) {
    let new = new_session();
    let snapshot = SnapshotId::random();
    let state = DriverState {
        json: "{}".into(),
        state: SessionState::Paused,
        reason: StateReason::Ready,
        sandbox: None,
        epoch: 0,
        snapshot: Some(snapshot.clone()),
        resting: true,
    };
    let taken = Write::SnapshotInsert { snapshot, kind: SnapshotKind::Pause, turn: None, at: NOW };
    let created = Write::CreatedId { key: new.id.to_string(), id: new.id.to_string() };
    (new, vec![warning("kept"), taken, created, Write::DriverState(state)])
}

/// Rows that the server has read from each table, once all other connections are closed.
async fn rows_read(database: &TestDatabase) -> BTreeMap<String, i64> {
    let mut connection = database.raw().await;
    let others = "SELECT COUNT(*) AS number FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()";
    while sqlx::query(others).fetch_one(&mut connection).await.unwrap().get::<i64, _>("number") > 0
    {
        tokio::task::yield_now().await;
    }
    let read = "SELECT CAST(relname AS TEXT) AS name,
         seq_tup_read + COALESCE(idx_tup_fetch, 0) AS number FROM pg_stat_user_tables";
    let rows = sqlx::query(read).fetch_all(&mut connection).await.unwrap();
    rows.iter().map(|row| (row.get("name"), row.get("number"))).collect()
}

async fn use_one(test: &TestStore) {
    let store = &test.store;
    store.session_at_work().await.unwrap();
    store.session_sandboxes().await.unwrap();
    store.idempotency_release_all().await.unwrap();
    let filter = SessionFilter { archived: Some(false), ..SessionFilter::default() };
    store.session_find(&filter, None, 2).await.unwrap();
    store.idempotency_claim("new", "hash", NOW).await.unwrap();
    let (new, mut writes) = kept();
    let id: SessionId = new.id.clone();
    writes.push(Write::CreatedId { key: "new".into(), id: id.to_string() });
    store.session_insert_all(test.lease, vec![(new, writes)]).await.unwrap();
    let prompt = prompt(&harvest_proto::PromptId::random());
    test.commit(&id, vec![prompt, warning("turn")]).await.unwrap();
    let prefix = SessionFilter { id_prefix: Some(id.to_string()), ..SessionFilter::default() };
    assert_eq!(store.session_find(&prefix, None, 2).await.unwrap().records.len(), 1);
    store.session_delete(&id, test.lease, Vec::new(), NOW).await.unwrap();
}

#[tokio::test]
async fn operations_read_few_of_many_sessions() {
    let test = TestStore::postgres().await;
    let all: Vec<_> = (0..KEPT).map(|_| kept()).collect();
    let claims = all.iter().map(async |(new, _)| {
        let key = new.id.to_string();
        test.store.idempotency_claim(&key, "hash", NOW).await.unwrap();
        test.store.idempotency_finish(&key, "response").await.unwrap();
    });
    futures_util::future::join_all(claims).await;
    test.store.session_insert_all(test.lease, all).await.unwrap();
    test.store.close().await;
    // For so few rows the planner would rather scan a table, although there is an index.
    let setting = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET enable_seqscan = off', current_database()); END $$";
    test.database.sql(&format!("ANALYZE; {setting}")).await;
    let before = rows_read(&test.database).await;
    let test = TestStore::at(test.database).await;
    use_one(&test).await;
    test.store.close().await;
    let mut read = rows_read(&test.database).await;
    read.iter_mut().for_each(|(table, rows)| *rows -= before[table]);
    assert!(read.values().all(|rows| *rows < MOST_ROWS), "{read:#?}");
}
