//! Sweeps a home whose test was killed: a server, a zygote and sandboxes live on by design, and nobody would
//! look for those of a run that is over.

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command, Stdio},
};

use crate::binary;

// Waits until the home is gone, as it is when a test ends in order, or the process it is for. Then it ends the
// servers of that home, and none else: they have it in their environment.
const WATCHER: &str = r#"
whom=$1 home=$2 harvest=$3
while kill -0 "$whom" 2>/dev/null && [ -d "$home" ]; do sleep 0.5; done
[ -d "$home" ] || exit 0
for process in /proc/[0-9]*; do
  grep -zqxF "HARVEST_HOME=$home" "$process/environ" && grep -zqxF up "$process/cmdline" &&
    kill -9 "${process#/proc/}"
done
export HARVEST_HOME="$home"
for try in 1 2 3 4 5 6; do
  "$harvest" gc --all && rm -rf --one-file-system "$home" && exit
  sleep 0.5
done
"#;

/// Has everything of `home` ended and removed once the process `whom` is gone, however it went.
///
/// # Panics
/// When that cannot be seen to.
pub fn sweep_after(whom: u32, home: &Path, env: &BTreeMap<String, String>) {
    // Out of the test's process group, which is killed as a whole, and off its output, which is waited for.
    let mut watcher = Command::new("setsid");
    watcher.args(["--fork", "sh", "-c", WATCHER, "sweeper", &whom.to_string()]);
    watcher.arg(home).arg(binary("harvest")).envs(env).current_dir("/");
    watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(watcher.status().expect("setsid starts").success());
}
