//! Cleans up the home of a killed test: its server, zygote and sandboxes outlive it by design.

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command, Stdio},
};

use crate::binary;

// Waits until the home is removed (a normal end) or the watched process is gone. In the second case
// it kills the servers that have this home in their environment.
const WATCHER: &str = r#"
whom=$1 harvest=$2 home=$SWEPT_HOME
while kill -0 "$whom" 2>/dev/null && [ -d "$home" ]; do sleep 0.5; done
[ -d "$home" ] || exit 0
for process in /proc/[0-9]*; do
  grep -zqxF "HARVEST_HOME=$home" "$process/environ" && grep -zqxF up "$process/cmdline" &&
    kill -9 "${process#/proc/}"
done
export HARVEST_HOME="$home"
for try in 1 2 3 4 5 6; do
  "$harvest" gc --all --yes && rm -rf --one-file-system "$home" && exit
  sleep 0.5
done
"#;

/// Starts a process that removes everything of `home` when the process `whom` has exited.
///
/// # Panics
/// When the process cannot be started.
pub fn sweep_after(whom: u32, home: &Path, env: &BTreeMap<String, String>) {
    // Outside the test's process group, which is killed as a whole, and without its output streams,
    // which the runner waits for.
    let mut watcher = Command::new("setsid");
    watcher.args(["--fork", "sh", "-c", WATCHER, "sweeper", &whom.to_string()]);
    // The home is not an argument: tests search for processes that have it as one.
    watcher.arg(binary("harvest")).env("SWEPT_HOME", home).envs(env).current_dir("/");
    watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(watcher.status().expect("setsid starts").success());
}
