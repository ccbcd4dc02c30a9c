//! Lost connections to PostgreSQL before, in and at the end of a transaction.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use harvest_e2e::{Database, eventually};
use harvest_store::{Store, StoreError};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream, unix::OwnedReadHalf},
};

use super::error_chain;
use crate::test_store::{NOW, TestDatabase, TestStore, warning};

fn database(test: &TestStore) -> &Database {
    match &test.database {
        TestDatabase::Server(database) => database,
        TestDatabase::File(_) => panic!("not a server"),
    }
}

/// Terminates the connections that match `doing`; returns their number.
fn terminate(database: &Database, doing: &str) -> usize {
    let sql = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid() AND {doing}"
    );
    database.sql(&sql).lines().count()
}

#[tokio::test]
async fn lost_idle_connection_is_replaced() {
    let test = TestStore::postgres().await;
    let session = test.session().await;
    for round in 1..=3 {
        assert!(terminate(database(&test), "true") >= 1);
        assert_eq!(test.commit(&session, vec![warning("w")]).await.unwrap(), round);
        assert_eq!(test.seqs(&session).await.len() as u64, round);
    }
}

#[tokio::test]
async fn connection_lost_mid_transaction_stores_nothing() {
    let test = TestStore::postgres().await;
    let (session, other) = (test.session().await, test.session().await);
    let mut blocker = test.database.raw().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE events IN EXCLUSIVE MODE")
        .execute(&mut blocker)
        .await
        .unwrap();
    let writes = |session| {
        let (store, lease) = (test.store.clone(), test.lease);
        tokio::spawn(async move {
            store.session_commit(&session, lease, NOW, vec![warning("lost")]).await
        })
    };
    let lost = [writes(session.clone()), writes(other.clone())];
    let database = database(&test);
    eventually("the writer to wait for the events", || async {
        (terminate(database, "wait_event_type = 'Lock' AND query LIKE 'INSERT INTO events%'") > 0)
            .then_some(())
    })
    .await;
    for one in lost {
        let error = one.await.unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Commit { .. } | StoreError::Database(_)), "{error:?}");
        assert!(error_chain(&error).contains("terminating connection"), "{}", error_chain(&error));
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
    for session in [session, other] {
        assert!(test.seqs(&session).await.is_empty());
        assert_eq!(test.commit(&session, vec![warning("next")]).await.unwrap(), 1);
    }
}

#[tokio::test]
async fn takeover_waits_for_write_in_progress() {
    let test = TestStore::postgres().await;
    let session = test.session().await;
    let newer = test.database.store().await;
    let mut blocker = test.database.raw().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE events IN EXCLUSIVE MODE")
        .execute(&mut blocker)
        .await
        .unwrap();
    let writing = {
        let (store, session, lease) = (test.store.clone(), session.clone(), test.lease);
        tokio::spawn(async move {
            store.session_commit(&session, lease, NOW, vec![warning("in time")]).await
        })
    };
    let waits = |what: &str| {
        let sql = format!("SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event = '{what}'");
        database(&test).sql(&format!("{sql} AND datname = current_database()")) == "1"
    };
    eventually("the older server to write", || async { waits("relation").then_some(()) }).await;
    let lease = tokio::spawn({
        let newer = newer.clone();
        async move { newer.server_lease(NOW).await.unwrap() }
    });
    // Otherwise it could read rows that the older server is about to change.
    eventually("the newer server to wait", || async {
        assert!(!lease.is_finished(), "the newer server did not wait");
        waits("advisory").then_some(())
    })
    .await;
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
    assert_eq!(writing.await.unwrap().unwrap().seq, 1);
    lease.await.unwrap();
    assert_eq!(newer.session_get(&session).await.unwrap().session.seq, 1);
    assert!(matches!(
        test.commit(&session, vec![warning("late")]).await,
        Err(StoreError::LeaseLost)
    ));
}

#[tokio::test]
async fn commit_with_lost_reply_gets_true_outcome() {
    for (fault, stored) in [(AFTER_COMMIT, true), (BEFORE_COMMIT, false)] {
        let database = TestDatabase::postgres();
        let folder = tempfile::tempdir().unwrap();
        let TestDatabase::Server(server) = &database else { panic!("not a server") };
        let cut = proxy(server, folder.path());
        let url = server.url_at(folder.path()).parse().unwrap();
        let store = Store::connect(&url).await.unwrap();
        let lease = store.server_lease(NOW).await.unwrap();
        let test = TestStore { store, lease, database };
        let session = test.session().await;
        let mut follower = test.store.event_follow(&session);

        cut.store(fault, Ordering::SeqCst);
        let done = test.commit(&session, vec![warning("unsettled")]).await;
        assert_eq!(cut.load(Ordering::SeqCst), NEVER, "the connection was cut");
        match stored {
            true => assert_eq!(done.unwrap(), 1),
            false => assert!(matches!(done, Err(StoreError::Commit { .. })), "{done:?}"),
        }
        assert_eq!(test.seqs(&session).await.len(), usize::from(stored));
        let next = test.commit(&session, vec![warning("next")]).await.unwrap();
        assert_eq!(next, if stored { 2 } else { 1 });
        for seq in 1..=next {
            assert_eq!(follower.recv().await.unwrap().seq, seq);
        }
    }
}

#[tokio::test]
async fn unsettled_commit_is_unknown_after_close() {
    let database = TestDatabase::postgres();
    let folder = tempfile::tempdir().unwrap();
    let TestDatabase::Server(server) = &database else { panic!("not a server") };
    let cut = proxy(server, folder.path());
    let store = Store::connect(&server.url_at(folder.path()).parse().unwrap()).await.unwrap();
    let lease = store.server_lease(NOW).await.unwrap();
    let test = TestStore { store, lease, database };
    let session = test.session().await;
    cut.store(FOR_GOOD, Ordering::SeqCst);
    let unsettled = {
        let (store, session) = (test.store.clone(), session.clone());
        tokio::spawn(
            async move { store.session_commit(&session, lease, NOW, vec![warning("?")]).await },
        )
    };
    eventually("the cut", || async { (cut.load(Ordering::SeqCst) == GONE).then_some(()) }).await;
    let later = test.commit(&session, vec![warning("later")]).await;
    assert!(
        matches!(later, Err(StoreError::Commit { .. })),
        "a write that was never sent is not unknown: {later:?}"
    );
    assert!(!unsettled.is_finished(), "the outcome is not guessed");
    test.store.close().await;
    let unsettled = unsettled.await.unwrap();
    assert!(matches!(unsettled, Err(StoreError::Unknown { .. })), "{unsettled:?}");
}

#[tokio::test]
async fn unreachable_database_is_named_without_password() {
    let url = "postgres://ada:s3cret@127.0.0.1:1/harvest".parse().unwrap();
    let error = Store::connect(&url).await.unwrap_err();
    let text = error_chain(&error);
    assert!(text.contains("postgres://ada@127.0.0.1:1/harvest"), "{text}");
    assert!(!format!("{text} {error:?}").contains("s3cret"));
}

const NEVER: u8 = 0;
/// The server commits; its reply is dropped.
const AFTER_COMMIT: u8 = 1;
/// The COMMIT does not reach the server.
const BEFORE_COMMIT: u8 = 2;
/// Like `AFTER_COMMIT`, and all later connections are refused.
const FOR_GOOD: u8 = 3;
const GONE: u8 = 4;

/// A proxy between store and server that cuts the connection once, as set in the returned value.
fn proxy(database: &Database, folder: &Path) -> Arc<AtomicU8> {
    let url = database.url();
    let real = url.split_once("host=").unwrap().1.to_owned() + "/.s.PGSQL.5432";
    let listener = UnixListener::bind(folder.join(".s.PGSQL.5432")).unwrap();
    let cut = Arc::new(AtomicU8::new(NEVER));
    let shared = Arc::clone(&cut);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            if shared.load(Ordering::SeqCst) != GONE {
                let server = UnixStream::connect(&real).await.unwrap();
                tokio::spawn(between(client, server, Arc::clone(&shared)));
            }
        }
    });
    cut
}

async fn between(client: UnixStream, server: UnixStream, cut: Arc<AtomicU8>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let mut buffers = ([0; 65_536], [0; 65_536]);
    loop {
        tokio::select! {
            read = from_client.read(&mut buffers.0) => {
                let sent = &buffers.0[..read.unwrap_or(0)];
                if sent.is_empty() {
                    return;
                }
                let mode = cut.load(Ordering::SeqCst);
                if (AFTER_COMMIT..=FOR_GOOD).contains(&mode) && sent.windows(7).any(|part| part == b"COMMIT\0") {
                    if mode != BEFORE_COMMIT {
                        to_server.write_all(sent).await.unwrap();
                        wait_for_reply(&mut from_server).await;
                    }
                    cut.store(if mode == FOR_GOOD { GONE } else { NEVER }, Ordering::SeqCst);
                    return;
                }
                to_server.write_all(sent).await.unwrap();
            }
            read = from_server.read(&mut buffers.1) => {
                let said = &buffers.1[..read.unwrap_or(0)];
                if said.is_empty() || to_client.write_all(said).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn wait_for_reply(from_server: &mut OwnedReadHalf) {
    let mut reply = [0; 65_536];
    assert!(from_server.read(&mut reply).await.unwrap() > 0);
}
