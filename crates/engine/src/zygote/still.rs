//! Makes a sandbox's commands stand still and go on: by their cgroup, or, for an ordinary user who has
//! none, by a signal to pid 1, which stops everything below it and not itself.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use harvest_proto::launch::{GO_ON_SIGNAL, STAND_STILL_SIGNAL};
use rustix::process::{Signal, pidfd_send_signal};

use crate::{
    cgroup::Hierarchy,
    error::{Doing, StepError},
};

// As long as a cgroup gets.
const PATIENCE: Duration = Duration::from_millis(500);

/// Freezes or thaws; answers when the state is reached.
pub(super) fn freeze(
    cgroups: &Hierarchy,
    (group, part): (&str, &str),
    (pid, pidfd): (u32, &OwnedFd),
    frozen: bool,
) -> Result<(), StepError> {
    if *cgroups != Hierarchy::None {
        return cgroups.freeze(group, part, frozen);
    }
    let doing = || "stop the commands".to_owned();
    let number = if frozen { STAND_STILL_SIGNAL } else { GO_ON_SIGNAL };
    let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput);
    let sent = signal.map_err(io::Error::from).and_then(|signal| Ok(pidfd_send_signal(pidfd, signal)?));
    sent.doing(doing)?;
    let end = Instant::now() + PATIENCE;
    while frozen && !all_stopped(pid) {
        if Instant::now() > end {
            return Err(StepError::new(doing(), io::ErrorKind::TimedOut.into()));
        }
        thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}

/// Whether everything below a process is stopped or dead. All of it is stopped at once, so that nothing
/// can slip away between two looks.
fn all_stopped(root: u32) -> bool {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let about = pid.and_then(|pid| Some((pid, stat(&format!("/proc/{pid}/stat"))?)));
        if let Some((pid, (_, parent))) = about {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            let tasks = fs::read_dir(format!("/proc/{child}/task")).into_iter().flatten().flatten();
            let mut states = tasks.filter_map(|task| stat(task.path().join("stat").to_str()?));
            if !states.all(|(state, _)| matches!(state, 'T' | 't' | 'Z' | 'X')) {
                return false;
            }
            open.push(child);
        }
    }
    true
}

/// The state and the parent of a process or thread.
fn stat(path: &str) -> Option<(char, u32)> {
    let text = fs::read_to_string(path).ok()?;
    // The program's name may hold anything; what follows the last parenthesis is the kernel's.
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
