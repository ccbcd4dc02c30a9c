//! A PostgreSQL server that goes away: before, in the middle of and at the end of a transaction.

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

use super::chain;
use crate::home::{Home, Kept, NOW, warning};

fn database(home: &Home) -> &Database {
    match &home.kept {
        Kept::Server(database) => database,
        Kept::File(_) => panic!("not a server"),
    }
}

/// Ends the connections that do this right now; answers how many.
fn terminate(database: &Database, doing: &str) -> usize {
    let sql = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid() AND {doing}"
    );
    database.sql(&sql).lines().count()
}

#[tokio::test]
async fn a_connection_that_died_while_idle_is_made_again_unnoticed() {
    let home = Home::postgres().await;
    let session = home.session().await;
    for round in 1..=3 {
        assert!(terminate(database(&home), "true") >= 1);
        assert_eq!(home.commit(&session, vec![warning("w")]).await.unwrap(), round);
        assert_eq!(home.seqs(&session).await.len() as u64, round);
    }
}

#[tokio::test]
async fn a_connection_killed_in_mid_transaction_leaves_nothing_of_it() {
    let home = Home::postgres().await;
    let (session, other) = (home.session().await, home.session().await);
    let mut blocker = home.kept.raw().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE events IN EXCLUSIVE MODE")
        .execute(&mut blocker)
        .await
        .unwrap();
    let writes = |session| {
        let (store, lease) = (home.store.clone(), home.lease);
        tokio::spawn(async move {
            store.session_commit(&session, lease, NOW, vec![warning("lost")]).await
        })
    };
    let lost = [writes(session.clone()), writes(other.clone())];
    let database = database(&home);
    eventually("the writer to wait for the events", || async {
        (terminate(database, "wait_event_type = 'Lock' AND query LIKE 'INSERT INTO events%'") > 0)
            .then_some(())
    })
    .await;
    for one in lost {
        let error = one.await.unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Commit { .. } | StoreError::Database(_)), "{error:?}");
        assert!(chain(&error).contains("terminating connection"), "{}", chain(&error));
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
    for session in [session, other] {
        assert!(home.seqs(&session).await.is_empty());
        assert_eq!(home.commit(&session, vec![warning("goes on")]).await.unwrap(), 1);
    }
}

#[tokio::test]
async fn a_server_that_takes_over_waits_for_the_write_in_progress() {
    let home = Home::postgres().await;
    let session = home.session().await;
    let newer = home.kept.store().await;
    let mut blocker = home.kept.raw().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE events IN EXCLUSIVE MODE")
        .execute(&mut blocker)
        .await
        .unwrap();
    let writing = {
        let (store, session, lease) = (home.store.clone(), session.clone(), home.lease);
        tokio::spawn(async move {
            store.session_commit(&session, lease, NOW, vec![warning("in time")]).await
        })
    };
    let waits = |what: &str| {
        let sql = format!("SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event = '{what}'");
        database(&home).sql(&format!("{sql} AND datname = current_database()")) == "1"
    };
    eventually("the older to write", || async { waits("relation").then_some(()) }).await;
    let lease = tokio::spawn({
        let newer = newer.clone();
        async move { newer.server_lease(NOW).await.unwrap() }
    });
    // Else it could read what the older is still about to change.
    eventually("the newer to wait", || async {
        assert!(!lease.is_finished(), "it did not wait");
        waits("advisory").then_some(())
    })
    .await;
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
    assert_eq!(writing.await.unwrap().unwrap().seq, 1);
    lease.await.unwrap();
    assert_eq!(newer.session_get(&session).await.unwrap().session.seq, 1);
    assert!(matches!(
        home.commit(&session, vec![warning("late")]).await,
        Err(StoreError::LeaseLost)
    ));
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_answered_as_it_went() {
    for (fault, stored) in [(AFTER_COMMIT, true), (BEFORE_COMMIT, false)] {
        let kept = Kept::postgres();
        let folder = tempfile::tempdir().unwrap();
        let Kept::Server(database) = &kept else { panic!("not a server") };
        let cut = proxy(database, folder.path());
        let url = database.url_at(folder.path()).parse().unwrap();
        let store = Store::connect(&url).await.unwrap();
        let lease = store.server_lease(NOW).await.unwrap();
        let home = Home { store, lease, kept };
        let session = home.session().await;
        let mut follower = home.store.event_follow(&session);

        cut.store(fault, Ordering::SeqCst);
        let done = home.commit(&session, vec![warning("in doubt")]).await;
        assert_eq!(cut.load(Ordering::SeqCst), NEVER, "it was cut");
        match stored {
            true => assert_eq!(done.unwrap(), 1),
            false => assert!(matches!(done, Err(StoreError::Commit { .. })), "{done:?}"),
        }
        assert_eq!(home.seqs(&session).await.len(), usize::from(stored));
        let next = home.commit(&session, vec![warning("goes on")]).await.unwrap();
        assert_eq!(next, if stored { 2 } else { 1 });
        for seq in 1..=next {
            assert_eq!(follower.recv().await.unwrap().seq, seq);
        }
    }
}

#[tokio::test]
async fn a_commit_in_doubt_when_the_store_is_closed_is_called_unknown() {
    let kept = Kept::postgres();
    let folder = tempfile::tempdir().unwrap();
    let Kept::Server(database) = &kept else { panic!("not a server") };
    let cut = proxy(database, folder.path());
    let store = Store::connect(&database.url_at(folder.path()).parse().unwrap()).await.unwrap();
    let lease = store.server_lease(NOW).await.unwrap();
    let home = Home { store, lease, kept };
    let session = home.session().await;
    cut.store(FOR_GOOD, Ordering::SeqCst);
    let doubtful = {
        let (store, session) = (home.store.clone(), session.clone());
        tokio::spawn(
            async move { store.session_commit(&session, lease, NOW, vec![warning("?")]).await },
        )
    };
    eventually("the cut", || async { (cut.load(Ordering::SeqCst) == GONE).then_some(()) }).await;
    let later = home.commit(&session, vec![warning("later")]).await;
    assert!(
        matches!(later, Err(StoreError::Commit { .. })),
        "what was never sent is not in doubt: {later:?}"
    );
    assert!(!doubtful.is_finished(), "it is not guessed");
    home.store.close().await;
    let doubtful = doubtful.await.unwrap();
    assert!(matches!(doubtful, Err(StoreError::Unknown { .. })), "{doubtful:?}");
}

#[tokio::test]
async fn a_database_out_of_reach_is_named_without_its_password() {
    let url = "postgres://ada:s3cret@127.0.0.1:1/harvest".parse().unwrap();
    let error = Store::connect(&url).await.unwrap_err();
    let words = chain(&error);
    assert!(words.contains("postgres://ada@127.0.0.1:1/harvest"), "{words}");
    assert!(!format!("{words} {error:?}").contains("s3cret"));
}

const NEVER: u8 = 0;
/// The server does it; its answer is thrown away.
const AFTER_COMMIT: u8 = 1;
/// The server never hears of it.
const BEFORE_COMMIT: u8 = 2;
/// As after, and nobody gets through any more.
const FOR_GOOD: u8 = 3;
const GONE: u8 = 4;

/// Stands between the store and the server, and cuts the connection once as told.
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
                let told = cut.load(Ordering::SeqCst);
                if (AFTER_COMMIT..=FOR_GOOD).contains(&told) && sent.windows(7).any(|part| part == b"COMMIT\0") {
                    if told != BEFORE_COMMIT {
                        to_server.write_all(sent).await.unwrap();
                        wait_for_answer(&mut from_server).await;
                    }
                    cut.store(if told == FOR_GOOD { GONE } else { NEVER }, Ordering::SeqCst);
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

async fn wait_for_answer(from_server: &mut OwnedReadHalf) {
    let mut answer = [0; 65_536];
    assert!(from_server.read(&mut answer).await.unwrap() > 0);
}
