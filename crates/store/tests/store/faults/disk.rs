//! A full disk while events are appended. Each test runs in a process with a small tmpfs in its own
//! mount namespace.

use std::path::{Path, PathBuf};

use harvest_e2e::Postgres;
use harvest_store::Store;

use super::{error_chain, run_ignored};
use crate::test_store::{NOW, TestDatabase, TestStore, warning};

/// Runs `test` where `HARVEST_TEST_FOLDER` is a disk of four megabytes.
fn on_a_small_disk(test: &str) {
    let folder = tempfile::tempdir().unwrap();
    let test = run_ignored(test);
    let mut inside = std::process::Command::new("unshare");
    inside.args(["--mount", "--propagation", "private", "sh", "-c"]);
    inside.arg(r#"mount -t tmpfs -o size=4m,mode=755 none "$HARVEST_TEST_FOLDER" && exec "$@""#);
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
    on_a_small_disk("faults::disk::sqlite_on_a_small_disk");
}

#[test]
fn full_disk_is_reported_on_postgres() {
    on_a_small_disk("faults::disk::postgres_on_a_small_disk");
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
