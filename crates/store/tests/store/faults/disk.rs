//! A full disk while events are appended. Each test runs in a process with a small tmpfs in its own
//! mount namespace.

use std::path::{Path, PathBuf};

use harvest_e2e::Postgres;
use harvest_proto::{SnapshotId, api::Verification};
use harvest_store::{Store, Write};

use super::{error_chain, run_ignored};
use crate::{
    test_store::{NOW, TestDatabase, TestStore, warning},
    verifications,
};

/// Runs `test` where `HARVEST_TEST_FOLDER` is a disk of this size.
fn on_a_disk(size: &str, test: &str) {
    let folder = tempfile::tempdir().unwrap();
    let test = run_ignored(test);
    let mut inside = std::process::Command::new("unshare");
    inside.args(["--mount", "--propagation", "private", "sh", "-c"]);
    let mount = r#"none "$HARVEST_TEST_FOLDER" && exec "$@""#;
    inside.arg(format!("mount -t tmpfs -o size={size},mode=755 {mount}"));
    inside.arg("sh").arg(test.get_program()).args(test.get_args());
    let ran = inside.env("HARVEST_TEST_FOLDER", folder.path()).output().unwrap();
    let output = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{output}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(output.contains("1 passed"), "{output}");
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os("HARVEST_TEST_FOLDER").expect("set by the other test"))
}

/// A file to delete when the disk is full.
fn ballast(folder: &Path) -> PathBuf {
    let path = folder.join("ballast");
    std::fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
    path
}

#[test]
fn full_disk_is_reported_on_sqlite() {
    on_a_disk("4m", "faults::disk::sqlite_on_a_small_disk");
}

#[test]
fn full_disk_is_reported_on_postgres() {
    on_a_disk("4m", "faults::disk::postgres_on_a_small_disk");
}

#[test]
fn full_disk_allows_deletion_and_start() {
    on_a_disk("128m", "faults::disk::sqlite_with_reserve");
}

#[test]
fn full_disk_allows_the_end_of_a_verification() {
    on_a_disk("128m", "faults::disk::verification_with_reserve");
}

/// Writes a file until the disk is full.
fn fill_up(path: &Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(path).unwrap();
    while file.write(&[b'x'; 4096]).is_ok_and(|written| written > 0) {}
}

#[tokio::test]
#[ignore = "started by another test on a small disk"]
async fn sqlite_with_reserve() {
    let (path, ballast) = (folder().join("store.db"), folder().join("ballast"));
    let reserved = || {
        let found = std::fs::metadata(folder().join("store.db.reserve")).unwrap();
        std::os::unix::fs::MetadataExt::blocks(&found) * 512
    };
    let open = async || {
        let store = Store::open(&path).await.unwrap();
        let lease = store.server_lease(NOW).await.unwrap();
        TestStore { store, lease, database: TestDatabase::sqlite() }
    };
    let mut test = open().await;
    let (session, other) = (test.session().await, test.session().await);
    let long = "x".repeat(1 << 20);
    for _ in 0..5 {
        test.commit(&session, vec![warning(&long)]).await.unwrap();
    }
    assert_eq!(reserved(), 32 << 20);
    for _ in 0..2 {
        fill_up(&ballast);
        let refused = test.commit(&other, vec![warning("more")]).await.unwrap_err();
        assert!(refused.is_disk_full(), "{refused:?}");
        // The next server starts without another byte of the disk.
        test.store.close().await;
        test = open().await;
        assert_eq!(reserved(), 24 << 20, "a slice is released for the start");
        assert!(test.commit(&other, vec![warning("more")]).await.unwrap_err().is_disk_full());
        let stop = vec![Write::Position(None), warning("stopped")];
        fill_up(&folder().join("more"));
        // It may fit into what is left; the reserve is for the end of work.
        let _ = test.commit(&other, vec![Write::Position(Some(1))]).await;
        assert_eq!(reserved(), 24 << 20, "no slice is released for a running session");
        let stored = test.store.session_commit_end(&other, test.lease, NOW, stop).await;
        stored.expect("a stop is stored");
        assert_eq!(reserved(), 16 << 20, "another program took the first slice");
        test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
        std::fs::remove_file(&ballast).unwrap();
        std::fs::remove_file(folder().join("more")).unwrap();
        test.commit(&other, vec![warning("more")]).await.unwrap();
        assert_eq!(reserved(), 32 << 20, "the space is reserved again");
    }
}

#[tokio::test]
#[ignore = "started by another test on a small disk"]
async fn verification_with_reserve() {
    let store = Store::open(&folder().join("store.db")).await.unwrap();
    let lease = store.server_lease(NOW).await.unwrap();
    let test = TestStore { store, lease, database: TestDatabase::sqlite() };
    verifications::with_repository(&test).await;
    let begun = verifications::queued(1, None);
    test.store.verification_insert(lease, &begun, &SnapshotId::random()).await.unwrap();
    fill_up(&folder().join("ballast"));
    let why = Some("x".repeat(1 << 20));
    let running = Verification { error: why.clone(), ..begun.clone() };
    let refused = test.store.verification_update(lease, &running).await.unwrap_err();
    assert!(refused.is_disk_full(), "{refused:?}");
    let ended = Verification { error: why, ..verifications::done(&begun, None) };
    test.store.verification_update(lease, &ended).await.expect("an end is stored");
}

#[tokio::test]
#[ignore = "started by another test on a small disk"]
async fn sqlite_on_a_small_disk() {
    let ballast = ballast(&folder());
    let store = Store::open(&folder().join("store.db")).await.unwrap();
    let lease = store.server_lease(NOW).await.unwrap();
    // The parent test removes the folder.
    let database = TestDatabase::sqlite();
    fills_up(&TestStore { store, lease, database }, &ballast).await;
}

#[tokio::test]
#[ignore = "started by another test on a small disk"]
async fn postgres_on_a_small_disk() {
    let (space, ballast) = (folder().join("space"), ballast(&folder()));
    std::fs::create_dir(&space).unwrap();
    std::os::unix::fs::chown(&space, Some(65534), Some(65534)).unwrap();
    // A separate server: the shared one does not see this mount.
    let place = std::env::temp_dir().join(format!("harvest-pg-disk-{}", std::process::id()));
    let database = Postgres::start(&place, std::process::id(), &["fsync=off"]).database();
    database.sql(&format!("CREATE TABLESPACE small LOCATION '{}'", space.display()));
    let name = database.sql("SELECT current_database()");
    database.sql(&format!("ALTER DATABASE {name} SET default_tablespace = small"));
    let test = TestStore::at(TestDatabase::Server(database)).await;
    fills_up(&test, &ballast).await;
    test.store.close().await;
}

async fn fills_up(test: &TestStore, ballast: &Path) {
    let session = test.session().await;
    // Not compressible: PostgreSQL compresses large values.
    let page: String =
        (0..3_000_u32).map(|n| format!("{:x}", n.wrapping_mul(2_654_435_761))).collect();
    let mut acknowledged = 0;
    let error = loop {
        assert!(acknowledged < 2_000, "the disk does not fill up");
        match test.commit(&session, vec![warning(&page), warning("second half")]).await {
            Ok(seq) => acknowledged = seq,
            Err(error) => break error_chain(&error),
        }
    };
    assert!(acknowledged > 0, "{error}");
    let names_it = |error: &str| error.contains("full") || error.contains("No space left");
    assert!(names_it(&error), "{error}");
    // More than SQLite's cache: the transaction fails before the commit, together with its
    // neighbour.
    let (large, small) = tokio::join!(
        test.commit(&session, (0..300).map(|_| warning(&page)).collect()),
        test.commit(&session, vec![warning(&page)]),
    );
    for error in
        [large.map_err(|error| error_chain(&error)), small.map_err(|error| error_chain(&error))]
    {
        assert!(error.as_ref().is_err_and(|error| names_it(error)), "{error:?}");
    }
    assert_eq!(test.seqs(&session).await, (1..=acknowledged).collect::<Vec<_>>());
    std::fs::remove_file(ballast).unwrap();
    let next = test.commit(&session, vec![warning(&page), warning("second half")]).await.unwrap();
    assert_eq!(next, acknowledged + 2);
    assert_eq!(test.seqs(&session).await, (1..=next).collect::<Vec<_>>());
}
