//! Finds the processes, mounts, cgroups and loop devices of a home, for tests that check for leaks.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The kernel resources of a home.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Processes that have the home as an argument or are in one of its cgroups.
    pub processes: BTreeSet<u32>,
    /// Processes with the home in their mount table.
    pub mounting: BTreeSet<u32>,
    /// The home's cgroups.
    pub cgroups: BTreeSet<PathBuf>,
    /// Files behind loop devices.
    pub loops: BTreeSet<String>,
}

impl Leftovers {
    /// Scans the host. `groups` is the result of [`cgroup_of`] from when the zygote was alive.
    #[must_use]
    pub fn of(home: &Path, groups: Option<&str>) -> Self {
        let mut found = Self::default();
        let name = home.to_string_lossy();
        for pid in numbers("/proc") {
            let read =
                |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let in_group = groups.is_some_and(|group| read("cgroup").contains(group));
            // The home must be a whole argument: a shell script may contain its path. The sweeper
            // of killed tests does not count.
            let line = read("cmdline");
            let has = |wanted: &str| line.split('\0').any(|word| word == wanted);
            let named = has(&name) && !has("sweeper");
            if pid != std::process::id() && (named || in_group) {
                found.processes.insert(pid);
            }
            if read("mountinfo").lines().any(|line| line.contains(&*name)) {
                found.mounting.insert(pid);
            }
        }
        found.cgroups = groups.map(group_folders).unwrap_or_default();
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let file =
                fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.starts_with(&*name) {
                found.loops.insert(file.trim().to_owned());
            }
        }
        found
    }
}

/// The cgroup of a home, read while its zygote is alive.
#[must_use]
pub fn cgroup_of(home: &Path) -> Option<String> {
    let name = home.to_string_lossy();
    let zygotes = numbers("/proc").into_iter().filter(|pid| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split('\0').skip(1).take(2).eq(["zygote", &name])
    });
    zygotes.into_iter().find_map(|pid| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let part = groups
            .lines()
            .find_map(|line| line.split('/').find(|part| part.starts_with("harvest-")))?;
        Some(part.to_owned())
    })
}

/// The children of a home's cgroup: one per sandbox or standby sandbox.
#[must_use]
pub fn parts(group: &str) -> BTreeSet<String> {
    let mut parts = BTreeSet::new();
    for folder in group_folders(group) {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.path().is_dir());
        parts.extend(folders.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    }
    parts.remove("zygote");
    parts
}

/// The sorted names in a folder; empty when it does not exist.
#[must_use]
pub fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn group_folders(group: &str) -> BTreeSet<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    controllers
        .chain([root.to_owned()])
        .map(|folder| folder.join(group))
        .filter(|path| path.is_dir())
        .collect()
}

fn numbers(folder: &str) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
