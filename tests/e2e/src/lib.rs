//! Shared by the end-to-end tests: servers and homes, driven through the real binaries and the
//! public API only.
#![forbid(unsafe_code)]

mod host;
mod leftovers;
mod offline;
mod postgres;
mod stream;
mod sweeper;

pub use host::{Host, Ran};
pub use leftovers::{Leftovers, cgroup_of, names, parts};
pub use offline::{FRESH, OfflineHome, most_memory, private_memory, processes_with, until};
pub use postgres::{Database, Postgres};
pub use stream::Follower;
pub use sweeper::sweep_after;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// The timeout for anything a test waits for. Generous: it bounds a broken run and does not measure
/// a good one.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The path of a binary of this workspace.
///
/// # Panics
/// When it was not built.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own file");
    // Test binaries are in `deps`, the bench binary is one folder up.
    let beside = test.parent().expect("a program lies in a folder");
    let folder = if beside.ends_with("deps") { beside.parent().unwrap_or(beside) } else { beside };
    let path = folder.join(name);
    assert!(path.exists(), "{} is not built; run `make build` first", path.display());
    path
}

/// A unique argument for `sleep`, to find a process by its command line: the search covers the
/// whole host, where the same tests may run twice.
///
/// # Panics
/// When there is no /proc.
#[must_use]
pub fn unique() -> String {
    let random =
        std::fs::read_to_string("/proc/sys/kernel/random/uuid").expect("every Linux has it");
    let digits: String = random.bytes().take(12).map(|byte| char::from(b'0' + byte % 10)).collect();
    format!("1{digits}")
}

/// Polls until there is a value.
///
/// # Panics
/// When it is not there after [`PATIENCE`].
pub async fn eventually<T, Answer: Future<Output = Option<T>>>(
    what: &str,
    mut ask: impl FnMut() -> Answer,
) -> T {
    let begin = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(begin.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
