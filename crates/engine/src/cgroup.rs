//! Cgroups v1 and v2: which ones a sandbox gets, and how they are frozen, killed and removed.
//!
//! Each sandbox has two: `supervisor` for pid 1 and `work` for everything it starts. Limits,
//! freezing and killing act on `work`, so that a process over its limit never takes pid 1 down.

mod delegated;
mod home;
mod layout;
mod usage;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing, StepError},
    rootless,
    spec::Limits,
};
use layout::SandboxGroups;
pub use layout::{CgroupView, Group, Setting};
pub use usage::ComputeUsage;

/// The cgroup hierarchy of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hierarchy {
    /// One mount per controller.
    V1 {
        /// Mounts of `cpu`, `freezer`, `memory` and `pids`, and of `cpuacct` if there is one.
        mounts: BTreeMap<String, PathBuf>,
    },
    /// One mount for all.
    V2 {
        /// The mount point; for an unprivileged user the delegated folder below it.
        mount: PathBuf,
    },
    /// None that this user may use.
    None,
}

const CONTROLLERS: [&str; 4] = ["cpu", "freezer", "memory", "pids"];
// Counts CPU time, on v2 every cgroup does. A host may mount it without `cpu`, or not at all.
const ACCOUNTING: &str = "cpuacct";

impl Hierarchy {
    /// Detects the cgroups of this host.
    pub(crate) fn detect() -> Result<Self, StepError> {
        if rootless::is_active() {
            return Ok(delegated::find().map_or(Self::None, |mount| Self::V2 { mount }));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").doing(|| "read the mount table")?;
        Self::from_mounts(&mounts, |mount| {
            fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default()
        })
        .ok_or_else(|| {
            let missing =
                "neither cgroup v2 with memory and pids nor v1 with cpu, freezer, memory and pids";
            StepError::new(missing, io::ErrorKind::Unsupported)
        })
    }

    fn from_mounts(mountinfo: &str, controllers: impl Fn(&Path) -> String) -> Option<Self> {
        let mut v1 = BTreeMap::new();
        for line in mountinfo.lines() {
            let (left, right) = line.split_once(" - ")?;
            let mount = PathBuf::from(left.split(' ').nth(4)?);
            let right: Vec<&str> = right.split(' ').collect();
            let options = right.last().copied().unwrap_or_default();
            match right.first().copied() {
                Some("cgroup2") => {
                    let has = controllers(&mount);
                    let has = |name| has.split_whitespace().any(|word| word == name);
                    if has("memory") && has("pids") {
                        return Some(Self::V2 { mount });
                    }
                }
                Some("cgroup") => {
                    let known = |name: &&str| CONTROLLERS.contains(name) || *name == ACCOUNTING;
                    for name in options.split(',').filter(known) {
                        v1.insert(name.to_owned(), mount.clone());
                    }
                }
                _ => {}
            }
        }
        CONTROLLERS.iter().all(|name| v1.contains_key(*name)).then_some(Self::V1 { mounts: v1 })
    }

    /// Every folder below which a home's cgroups are, without duplicates.
    pub(crate) fn mounts(&self) -> Vec<&Path> {
        let mut mounts: Vec<&Path> = match self {
            Self::V2 { mount } => vec![mount],
            Self::V1 { mounts } => mounts.values().map(PathBuf::as_path).collect(),
            Self::None => Vec::new(),
        };
        // A host may mount several controllers together.
        mounts.sort();
        mounts.dedup();
        mounts
    }

    /// The cgroups of the sandbox `part` of the home `home`.
    pub(crate) fn groups(&self, home: &str, part: &str, limits: &Limits) -> SandboxGroups {
        match self {
            Self::V2 { mount } => layout::v2(&mount.join(home).join(part), limits),
            Self::V1 { mounts } => layout::v1(mounts, &Path::new(home).join(part), limits),
            Self::None => SandboxGroups::default(),
        }
    }

    /// What a sandbox sees of its cgroups.
    pub(crate) fn view(&self, home: &str, part: &str) -> CgroupView {
        match self {
            Self::V2 { mount } => layout::v2_view(&mount.join(home).join(part)),
            Self::V1 { mounts } => layout::v1_view(mounts, &Path::new(home).join(part)),
            Self::None => CgroupView::default(),
        }
    }

    /// The folders that can contain processes of a sandbox, innermost first: the order of removal.
    pub(crate) fn folders(&self, home: &str, part: &str) -> Vec<PathBuf> {
        let make = self.groups(home, part, &Limits::default()).make;
        make.into_iter().rev().map(|group| group.path).collect()
    }

    /// The folder of `work` in the hierarchy that freezes.
    pub(crate) fn freezer(&self, home: &str, part: &str) -> Option<PathBuf> {
        let below = Path::new(home).join(part).join("work");
        match self {
            Self::V2 { mount } => Some(mount.join(below)),
            Self::V1 { mounts } => Some(mounts["freezer"].join(below)),
            Self::None => None,
        }
    }

    /// How many processes the memory limit of `group` (`work` or `supervisor`) has killed.
    pub(crate) fn oom_kills(&self, home: &str, part: &str, group: &str) -> u64 {
        let below = Path::new(home).join(part).join(group);
        let file = match self {
            Self::V2 { mount } => mount.join(below).join("memory.events"),
            Self::V1 { mounts } => mounts["memory"].join(below).join("memory.oom_control"),
            Self::None => return 0,
        };
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill "))
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0)
    }

    /// What a sandbox uses; `None` where this host does not count it.
    pub(crate) fn usage(&self, home: &str, part: &str) -> Option<ComputeUsage> {
        let below = Path::new(home).join(part);
        match self {
            Self::V2 { mount } => usage::v2(&mount.join(below)),
            Self::V1 { mounts } => {
                usage::v1(&mounts.get(ACCOUNTING)?.join(&below), &mounts["memory"].join(&below))
            }
            Self::None => None,
        }
    }

    /// Requests a freeze or thaw of `work`. A thaw takes effect at once; a freeze usually within
    /// 0.1 ms, but not while a process waits for a disk: see [`Hierarchy::is_frozen`].
    pub(crate) fn freeze(&self, home: &str, part: &str, frozen: bool) -> Result<(), StepError> {
        let Some(folder) = self.freezer(home, part) else {
            return Err(StepError::new("freeze without cgroups", io::ErrorKind::Unsupported));
        };
        let (file, value) = match (self, frozen) {
            (Self::V2 { .. }, true) => ("cgroup.freeze", "1"),
            (Self::V2 { .. }, false) => ("cgroup.freeze", "0"),
            (_, true) => ("freezer.state", "FROZEN"),
            (_, false) => ("freezer.state", "THAWED"),
        };
        let path = folder.join(file);
        fs::write(&path, value).doing(|| format!("set {} to {value}", path.display()))?;
        if !frozen {
            // Groups below and above may have been frozen by hand, which would outlast this thaw
            // and, on v1, block a kill.
            for other in ["agent", "commands", "..", "../supervisor"] {
                let _ = fs::write(folder.join(other).join(file), value);
            }
        }
        Ok(())
    }

    /// Whether all of `work` is frozen.
    pub(crate) fn is_frozen(&self, home: &str, part: &str) -> bool {
        let (file, wanted) = match self {
            Self::V2 { .. } => ("cgroup.events", "frozen 1"),
            _ => ("freezer.state", "FROZEN"),
        };
        let Some(folder) = self.freezer(home, part) else { return false };
        let state = fs::read_to_string(folder.join(file)).unwrap_or_default();
        state.lines().any(|line| line == wanted)
    }

    /// The processes in `work`.
    pub(crate) fn work_processes(&self, home: &str, part: &str) -> Vec<Pid> {
        let Some(work) = self.freezer(home, part) else { return Vec::new() };
        [work.join("agent"), work.join("commands"), work]
            .iter()
            .flat_map(|group| processes(group))
            .collect()
    }

    /// Kills the processes in `work`; true when every one of them was reached and `work` may be
    /// used again. Does not wait, so it is called repeatedly. On v1 it leaves `work` frozen in
    /// between, unless `keep_frozen` says that it was frozen before: then it always stays so, and
    /// the killed processes die with the thaw.
    pub(crate) fn kill_work(&self, home: &str, part: &str, keep_frozen: bool) -> bool {
        let Some(work) = self.freezer(home, part) else { return true };
        // The kernel itself reaches processes that are being forked.
        if matches!(self, Self::V2 { .. }) && fs::write(work.join("cgroup.kill"), "1").is_ok() {
            return true;
        }
        // Frozen processes cannot fork between listing and killing. Without that, processes that
        // pid 1 has started for later commands would be killed together with late forks.
        let frozen = self.is_frozen(home, part);
        let left = self.work_processes(home, part);
        for pid in &left {
            let _ = kill_process(*pid, Signal::KILL);
        }
        if !frozen && !left.is_empty() {
            let _ = self.freeze(home, part, true);
            return false;
        }
        if !keep_frozen {
            let _ = self.freeze(home, part, false);
        }
        true
    }

    /// Kills the processes left in a sandbox's cgroups and removes the cgroups; true when none is
    /// left.
    pub(crate) fn clear(&self, home: &str, part: &str) -> bool {
        let folders = self.folders(home, part);
        // Frozen processes of v1 die only after a thaw.
        if matches!(self, Self::V1 { .. }) {
            let _ = self.freeze(home, part, false);
        }
        if let Self::V2 { mount } = self {
            let _ = fs::write(mount.join(home).join(part).join("cgroup.kill"), "1");
        }
        let mut empty = true;
        for folder in &folders {
            for pid in processes(folder) {
                empty = false;
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for folder in &folders {
            let _ = fs::remove_dir(folder);
        }
        empty && folders.iter().all(|folder| !folder.exists())
    }
}

/// The processes in one cgroup, without those below it.
fn processes(folder: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw)).collect()
}

#[cfg(test)]
mod tests;
