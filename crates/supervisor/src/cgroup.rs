//! What the supervisor may do with cgroups: kill everything the agent started and prove it, and
//! count what the memory limit has killed. It only uses the files it was born with.

use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};

// Between two looks at whether the agent's cgroup is empty.
const LOOK: Duration = Duration::from_millis(5);

// How long a v1 freezer may take before the killing goes on without it.
const FREEZE: Duration = Duration::from_millis(500);

/// The agent's cgroup.
#[derive(Debug)]
pub(crate) struct AgentGroup {
    pub(crate) joins: Vec<OwnedFd>,
    procs: Option<File>,
    kill: Option<File>,
    freezer: Option<File>,
}

impl AgentGroup {
    /// From the descriptors of the launch.
    pub(crate) fn new(
        joins: Vec<OwnedFd>,
        procs: Option<OwnedFd>,
        kill: Option<OwnedFd>,
        freezer: Option<OwnedFd>,
    ) -> Self {
        Self {
            joins,
            procs: procs.map(File::from),
            kill: kill.map(File::from),
            freezer: freezer.map(File::from),
        }
    }

    /// Whether the group's being empty proves anything; an ordinary user may have no cgroup.
    pub(crate) fn proves(&self) -> bool {
        self.procs.is_some()
    }

    /// Kills everything in the group until it is empty. False when that is not proven in time.
    pub(crate) async fn clear(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            match self.members() {
                Ok(members) if members.is_empty() => return true,
                Ok(members) => self.kill_once(&members).await,
                Err(error) => {
                    crate::log::line(format_args!("cannot read the agent's cgroup: {error}"))
                }
            }
            if Instant::now() >= deadline {
                return false;
            }
            sleep(LOOK).await;
        }
    }

    async fn kill_once(&self, members: &[Pid]) {
        if let Some(mut kill) = self.kill.as_ref() {
            if let Err(error) = kill.write_all(b"1") {
                crate::log::line(format_args!("cannot kill the agent's cgroup: {error}"));
            }
            return;
        }
        // Frozen processes cannot fork away from the list; the signal takes effect at the thaw.
        self.freeze().await;
        let members = self.members().unwrap_or_else(|_| members.to_vec());
        for pid in members {
            let _already_gone = kill_process(pid, Signal::KILL);
        }
        if let Some(mut freezer) = self.freezer.as_ref()
            && let Err(error) = freezer.write_all(b"THAWED")
        {
            crate::log::line(format_args!("cannot thaw the agent's cgroup: {error}"));
        }
    }

    async fn freeze(&self) {
        let Some(mut freezer) = self.freezer.as_ref() else { return };
        if freezer.write_all(b"FROZEN").is_err() {
            return;
        }
        let deadline = Instant::now() + FREEZE;
        while Instant::now() < deadline
            && !matches!(read_again(freezer), Ok(state) if state.trim() == "FROZEN")
        {
            sleep(Duration::from_millis(1)).await;
        }
    }

    fn members(&self) -> io::Result<Vec<Pid>> {
        let Some(procs) = &self.procs else { return Ok(Vec::new()) };
        let text = read_anew(procs)?;
        Ok(text
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .filter_map(Pid::from_raw)
            .collect())
    }
}

/// Counts what the memory limit has killed.
#[derive(Debug)]
pub(crate) struct OomCount(Option<File>);

impl OomCount {
    pub(crate) fn new(descriptor: Option<OwnedFd>) -> Self {
        Self(descriptor.map(File::from))
    }

    /// How many processes so far.
    pub(crate) fn read(&self) -> u64 {
        let text = self.0.as_ref().and_then(|file| read_again(file).ok()).unwrap_or_default();
        count(&text)
    }
}

fn count(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == "oom_kill")
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

fn read_again(mut file: &File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

// A v1 kernel caches the list per open file for as long as it is read more often than once a
// second: only a newly opened file shows who is there now.
fn read_anew(file: &File) -> io::Result<String> {
    match File::open(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        Ok(anew) => read_again(&anew),
        Err(_) => read_again(file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_both_versions_of_the_file() {
        assert_eq!(count("low 0\nhigh 0\nmax 4\noom 1\noom_kill 3\noom_group_kill 0\n"), 3);
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(count(""), 0);
    }
}
