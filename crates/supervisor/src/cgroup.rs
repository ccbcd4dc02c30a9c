//! Kills all processes in the agent's cgroup and verifies that it is empty; counts OOM kills. Uses
//! only inherited descriptors.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use harvest_proto::launch::Descriptor;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};

use crate::{launch::InheritedFds, log};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

// How long to wait for a v1 freezer before killing without it.
const FREEZE_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct AgentGroup {
    pub(crate) joins: Vec<OwnedFd>,
    procs: Option<File>,
    kill: Option<File>,
    freezer: Option<File>,
}

impl AgentGroup {
    pub(crate) fn new(inherited: &mut InheritedFds) -> Self {
        let joins = inherited.take_all(Descriptor::JoinAgent);
        let mut file = |kind| inherited.take(kind).map(File::from);
        Self {
            joins,
            procs: file(Descriptor::AgentProcs),
            kill: file(Descriptor::AgentKill),
            freezer: file(Descriptor::AgentFreezer),
        }
    }

    /// Whether there is a cgroup at all; rootless hosts may have none.
    pub(crate) fn is_available(&self) -> bool {
        self.procs.is_some()
    }

    /// Kills all processes until the group is empty; false on timeout.
    pub(crate) async fn kill_all(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            match self.members() {
                Ok(members) if members.is_empty() => return true,
                Ok(members) => self.kill_once(&members).await,
                Err(error) => log::line(format_args!("cannot read the agent's cgroup: {error}")),
            }
            if Instant::now() >= deadline {
                return false;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn kill_once(&self, members: &[Pid]) {
        if let Some(mut kill) = self.kill.as_ref() {
            if let Err(error) = kill.write_all(b"1") {
                log::line(format_args!("cannot kill the agent's cgroup: {error}"));
            }
            return;
        }
        // Frozen processes cannot fork after they are listed; SIGKILL takes effect at the thaw.
        self.freeze().await;
        let members = self.members().unwrap_or_else(|_| members.to_vec());
        for pid in members {
            let _already_gone = kill_process(pid, Signal::KILL);
        }
        if let Some(mut freezer) = self.freezer.as_ref()
            && let Err(error) = freezer.write_all(b"THAWED")
        {
            log::line(format_args!("cannot thaw the agent's cgroup: {error}"));
        }
    }

    async fn freeze(&self) {
        let Some(mut freezer) = self.freezer.as_ref() else { return };
        if freezer.write_all(b"FROZEN").is_err() {
            return;
        }
        let deadline = Instant::now() + FREEZE_TIMEOUT;
        while Instant::now() < deadline
            && !matches!(reread(freezer), Ok(state) if state.trim() == "FROZEN")
        {
            sleep(Duration::from_millis(1)).await;
        }
    }

    fn members(&self) -> io::Result<Vec<Pid>> {
        let Some(procs) = &self.procs else { return Ok(Vec::new()) };
        let text = reopen_and_read(procs)?;
        Ok(text
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .filter_map(Pid::from_raw)
            .collect())
    }
}

/// The number of OOM kills.
#[derive(Debug)]
pub(crate) struct OomCount(Option<File>);

impl OomCount {
    pub(crate) fn new(inherited: &mut InheritedFds) -> Self {
        Self(inherited.take(Descriptor::OomCount).map(File::from))
    }

    pub(crate) fn read(&self) -> u64 {
        let text = self.0.as_ref().and_then(|file| reread(file).ok()).unwrap_or_default();
        oom_kills(&text)
    }
}

fn oom_kills(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == "oom_kill")
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

fn reread(mut file: &File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

// cgroup v1 caches the list per open file while it is read more than once a second: only a newly
// opened file is current.
fn reopen_and_read(file: &File) -> io::Result<String> {
    match File::open(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        Ok(reopened) => reread(&reopened),
        Err(_) => reread(file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_kills_are_parsed_in_both_cgroup_versions() {
        assert_eq!(oom_kills("low 0\nhigh 0\nmax 4\noom 1\noom_kill 3\noom_group_kill 0\n"), 3);
        assert_eq!(oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(oom_kills(""), 0);
    }
}
