//! A full disk while events are appended. Each runs as a process with a small disk of its own, in a mount
//! namespace that ends with it.

use std::path::{Path, PathBuf};

use harvest_e2e::Postgres;
use harvest_store::Store;

use super::{again, chain};
use crate::home::{Home, Kept, NOW, warning};

/// Runs `test` where `HARVEST_TEST_FOLDER` is a disk of four megabytes.
fn on_a_small_disk(test: &str) {
    let folder = tempfile::tempdir().unwrap();
    let test = again(test);
    let mut inside = std::process::Command::new("unshare");
    inside.args(["--mount", "--propagation", "private", "sh", "-c"]);
    inside.arg(r#"mount -t tmpfs -o size=4m,mode=755 none "$HARVEST_TEST_FOLDER" && exec "$@""#);
    inside.arg("sh").arg(test.get_program()).args(test.get_args());
    let ran = inside.env("HARVEST_TEST_FOLDER", folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(said.contains("1 passed"), "{said}");
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os("HARVEST_TEST_FOLDER").expect("set by the other test"))
}

/// What is there to be removed when it gets tight.
fn ballast(folder: &Path) -> PathBuf {
    let path = folder.join("ballast");
    std::fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
    path
}

#[test]
fn a_full_disk_is_named_and_nothing_is_half_written_on_sqlite() {
    on_a_small_disk("faults::disk::sqlite_on_a_small_disk");
}

#[test]
fn a_full_disk_is_named_and_nothing_is_half_written_on_postgres() {
    on_a_small_disk("faults::disk::postgres_on_a_small_disk");
}

#[tokio::test]
#[ignore = "needs the small disk that another test makes"]
async fn sqlite_on_a_small_disk() {
    let ballast = ballast(&folder());
    let store = Store::open(&folder().join("store.db")).await.unwrap();
    let lease = store.server_lease(NOW).await.unwrap();
    // The folder is the other test's to remove.
    let kept = Kept::sqlite();
    fills_up(&Home { store, lease, kept }, &ballast).await;
}

#[tokio::test]
#[ignore = "needs the small disk that another test makes"]
async fn postgres_on_a_small_disk() {
    let (space, ballast) = (folder().join("space"), ballast(&folder()));
    std::fs::create_dir(&space).unwrap();
    std::os::unix::fs::chown(&space, Some(65534), Some(65534)).unwrap();
    // A server of our own, because the shared one does not see this disk.
    let place = std::env::temp_dir().join(format!("harvest-pg-disk-{}", std::process::id()));
    let database = Postgres::start(&place, std::process::id(), &["fsync=off"]).database();
    database.sql(&format!("CREATE TABLESPACE small LOCATION '{}'", space.display()));
    let name = database.sql("SELECT current_database()");
    database.sql(&format!("ALTER DATABASE {name} SET default_tablespace = small"));
    let home = Home::at(Kept::Server(database)).await;
    fills_up(&home, &ballast).await;
    home.store.close().await;
}

async fn fills_up(home: &Home, ballast: &Path) {
    let session = home.session().await;
    // Not compressible, or PostgreSQL would make it small.
    let page: String =
        (0..3_000_u32).map(|n| format!("{:x}", n.wrapping_mul(2_654_435_761))).collect();
    let mut answered = 0;
    let error = loop {
        assert!(answered < 2_000, "the disk never fills");
        match home.commit(&session, vec![warning(&page), warning("second half")]).await {
            Ok(seq) => answered = seq,
            Err(error) => break chain(&error),
        }
    };
    assert!(answered > 0, "{error}");
    let names_it = |error: &str| error.contains("full") || error.contains("No space left");
    assert!(names_it(&error), "{error}");
    // More than SQLite keeps in memory until the commit: it fails in the middle, and a neighbour with it.
    let (large, small) = tokio::join!(
        home.commit(&session, (0..300).map(|_| warning(&page)).collect()),
        home.commit(&session, vec![warning(&page)]),
    );
    for error in [large.map_err(|error| chain(&error)), small.map_err(|error| chain(&error))] {
        assert!(error.as_ref().is_err_and(|error| names_it(error)), "{error:?}");
    }
    assert_eq!(home.seqs(&session).await, (1..=answered).collect::<Vec<_>>());
    std::fs::remove_file(ballast).unwrap();
    let next = home.commit(&session, vec![warning(&page), warning("second half")]).await.unwrap();
    assert_eq!(next, answered + 2);
    assert_eq!(home.seqs(&session).await, (1..=next).collect::<Vec<_>>());
}
