//! Cgroups, v1 and v2: which a sandbox gets, and what is done with them afterwards.
//!
//! Two per sandbox: `supervisor` for pid 1, `work` for everything it starts. Limits, freezing and
//! killing act on `work`, so that a hog never takes pid 1 along.

mod delegated;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use harvest_proto::launch::Descriptor;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing, StepError},
    rootless,
    spec::Limits,
};

/// Where the cgroups of this host are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hierarchy {
    /// One mount per controller.
    V1 {
        /// Mounts of `cpu`, `freezer`, `memory` and `pids`.
        mounts: BTreeMap<String, PathBuf>,
    },
    /// One mount for all.
    V2 {
        /// Where; for an ordinary user the folder in it that is theirs.
        mount: PathBuf,
    },
    /// Nothing that this user may use.
    None,
}

/// A cgroup to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its folder.
    pub path: PathBuf,
    /// Files to write, in order.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub settings: Vec<Setting>,
}

/// A value of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The file's name.
    pub file: String,
    /// What is written.
    pub value: String,
    /// A kernel without this file is good enough.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub optional: bool,
}

/// The cgroups of one sandbox, for a plan.
pub(crate) struct Groups {
    pub(crate) make: Vec<Group>,
    pub(crate) born_in: Option<PathBuf>,
    pub(crate) join: Vec<PathBuf>,
    pub(crate) inherit: Vec<(Descriptor, PathBuf, bool)>,
}

const CONTROLLERS: [&str; 4] = ["cpu", "freezer", "memory", "pids"];

// Pid 1 holds outboxes and stream windows, a few MiB; this stops a leak, not a normal day.
const SUPERVISOR_MEMORY_BYTES: u64 = 256 << 20;
// Where a container's own processes go when its root cgroup is divided.
const OTHERS: &str = "harvest-others";
// A process that was just being born or is dying is in no list and still keeps a cgroup from being divided.
const DIVIDE: Duration = Duration::from_secs(2);
// Room for the moment between fork and joining `work`.
const SUPERVISOR_PIDS: u32 = 512;
// What TCP holds is limited for the whole host together, to a tenth of its memory: without a limit of
// its own one sandbox took all of it. This fills a hundred connections.
const TCP_BYTES: u64 = 256 << 20;
// 100 ms: the kernel's default, long enough not to stutter, short enough to be fair.
const PERIOD_MICROS: u64 = 100_000;

fn set(file: &str, value: impl ToString) -> Setting {
    Setting { file: file.to_owned(), value: value.to_string(), optional: false }
}

fn maybe(file: &str, value: impl ToString) -> Setting {
    Setting { optional: true, ..set(file, value) }
}

impl Hierarchy {
    /// Finds the cgroups of this host.
    pub(crate) fn detect() -> Result<Self, StepError> {
        if rootless::is_here() {
            return Ok(delegated::find().map_or(Self::None, |mount| Self::V2 { mount }));
        }
        let mounts =
            fs::read_to_string("/proc/self/mountinfo").doing(|| "read the mount table".to_owned())?;
        Self::from_mounts(&mounts, |mount| {
            fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default()
        })
        .ok_or_else(|| {
            let missing = "neither cgroup v2 with memory and pids nor v1 with cpu, freezer, memory and pids";
            StepError::new(missing, io::ErrorKind::Unsupported.into())
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
                    if ["memory", "pids"].iter().all(|name| has.split_whitespace().any(|word| word == *name))
                    {
                        return Some(Self::V2 { mount });
                    }
                }
                Some("cgroup") => {
                    for name in options.split(',').filter(|name| CONTROLLERS.contains(name)) {
                        v1.insert(name.to_owned(), mount.clone());
                    }
                }
                _ => {}
            }
        }
        CONTROLLERS.iter().all(|name| v1.contains_key(*name)).then_some(Self::V1 { mounts: v1 })
    }

    /// Every folder below which a home's cgroups are, once.
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
    pub(crate) fn groups(&self, home: &str, part: &str, limits: &Limits) -> Groups {
        match self {
            Self::V2 { mount } => v2(&mount.join(home).join(part), limits),
            Self::V1 { mounts } => v1(mounts, &Path::new(home).join(part), limits),
            Self::None => Groups { make: Vec::new(), born_in: None, join: Vec::new(), inherit: Vec::new() },
        }
    }

    /// The folders that can hold processes of a sandbox, innermost first: the order of removal.
    pub(crate) fn folders(&self, home: &str, part: &str) -> Vec<PathBuf> {
        let make = self.groups(home, part, &Limits::default()).make;
        make.into_iter().rev().map(|group| group.path).collect()
    }

    /// Where `work` is frozen.
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

    /// Asks `work` to stand still or to go on. Going on takes effect at once; standing still within
    /// 0.1 ms as a rule, but not while a process waits for a disk: see [`Hierarchy::is_frozen`].
    pub(crate) fn freeze(&self, home: &str, part: &str, frozen: bool) -> Result<(), StepError> {
        let Some(folder) = self.freezer(home, part) else {
            return Err(StepError::new("freeze without a cgroup", io::ErrorKind::Unsupported.into()));
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
            // Somebody may have frozen one of them by hand, or all of the sandbox: it would outlast this, and on v1
            // a kill.
            for other in ["agent", "commands", "..", "../supervisor"] {
                let _ = fs::write(folder.join(other).join(file), value);
            }
        }
        Ok(())
    }

    /// Whether all of `work` stands still.
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
    pub(crate) fn working(&self, home: &str, part: &str) -> Vec<Pid> {
        let Some(work) = self.freezer(home, part) else { return Vec::new() };
        [work.join("agent"), work.join("commands"), work].iter().flat_map(|group| processes(group)).collect()
    }

    /// Kills what runs in `work`; true when nothing is left in it. Waits for nothing, so to be called
    /// again. `frozen` when a freeze is to outlast this: who is frozen dies with the thaw.
    pub(crate) fn kill_work(&self, home: &str, part: &str, frozen: bool) -> bool {
        let Some(work) = self.freezer(home, part) else { return true };
        // On v1 nothing forks while it stands still, so that none gets away between list and signal.
        let still = (matches!(self, Self::V1 { .. }) && !frozen).then(|| work.join("freezer.state"));
        if let Some(state) = &still {
            let _ = fs::write(state, "FROZEN");
        }
        let _ = fs::write(work.join("cgroup.kill"), "1");
        let left = self.working(home, part);
        for pid in &left {
            let _ = kill_process(*pid, Signal::KILL);
        }
        if let Some(state) = &still {
            let _ = fs::write(state, "THAWED");
        }
        left.is_empty()
    }

    /// Kills what is left in a sandbox's cgroups and removes them; true when nothing is left.
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

    /// Whether a sandbox's cgroups can get another name: v1 only. There it is worth while, because
    /// joining costs 7 to 15 ms after an idle moment; on v2 pid 1 is born in its cgroup.
    pub(crate) fn renames(&self) -> bool {
        matches!(self, Self::V1 { .. })
    }

    /// Gives a sandbox's cgroups another name.
    pub(crate) fn rename(&self, home: &str, from: &str, to: &str) -> Result<(), StepError> {
        for mount in self.mounts() {
            let group = mount.join(home);
            fs::rename(group.join(from), group.join(to))
                .doing(|| format!("rename cgroup {}", group.join(from).display()))?;
        }
        Ok(())
    }

    /// Makes the cgroup of a home with one for its zygote, and moves the caller there.
    pub(crate) fn enter_home(&self, home: &str) -> Result<(), StepError> {
        for mount in self.mounts() {
            let group = mount.join(home);
            if matches!(self, Self::V2 { .. }) {
                divide(mount)?;
                make_folder(&group)?;
                hand_down(&group).doing(|| handing_down(&group))?;
            }
            make_folder(&group)?;
            let zygote = group.join("zygote");
            make_folder(&zygote)?;
            let procs = zygote.join("cgroup.procs");
            fs::write(&procs, "0").doing(|| format!("join {}", procs.display()))?;
        }
        Ok(())
    }

    /// Leaves the cgroup of a home and removes it, unless sandboxes are left in it.
    pub(crate) fn leave_home(&self, home: &str) {
        for mount in self.mounts() {
            let back = |folder: &Path| fs::write(folder.join("cgroup.procs"), "0").is_ok();
            let others = mount.join(OTHERS);
            // A cgroup that was handed down and is divided takes nobody back.
            let _ = back(mount) || (make_folder(&others).is_ok() && back(&others));
            let _ = fs::remove_dir(mount.join(home).join("zygote"));
            let _ = fs::remove_dir(mount.join(home));
        }
    }

    /// The parts of the sandboxes that have a cgroup under this home.
    pub(crate) fn parts(&self, home: &str) -> Vec<String> {
        let mut parts: Vec<String> = Vec::new();
        for mount in self.mounts() {
            let entries = fs::read_dir(mount.join(home)).into_iter().flatten().flatten();
            let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            parts.extend(folders.filter_map(|entry| entry.file_name().into_string().ok()));
        }
        parts.sort();
        parts.dedup();
        parts.retain(|part| part != "zygote");
        parts
    }
}

fn v2(folder: &Path, limits: &Limits) -> Groups {
    let (supervisor, work) = (folder.join("supervisor"), folder.join("work"));
    let (agent, commands) = (work.join("agent"), work.join("commands"));
    let quota = u64::from(limits.cpu_millis_per_second) * PERIOD_MICROS / 1000;
    let make = vec![
        Group {
            path: folder.to_owned(),
            settings: vec![
                set("cgroup.subtree_control", "+memory +pids"),
                maybe("cgroup.subtree_control", "+cpu"),
            ],
        },
        Group {
            path: supervisor.clone(),
            settings: vec![
                set("memory.max", SUPERVISOR_MEMORY_BYTES),
                maybe("memory.swap.max", 0),
                set("pids.max", SUPERVISOR_PIDS),
            ],
        },
        Group {
            path: work.clone(),
            settings: vec![
                set("memory.max", limits.memory_bytes),
                maybe("memory.swap.max", 0),
                set("pids.max", limits.pids),
                maybe("cpu.max", format!("{quota} {PERIOD_MICROS}")),
            ],
        },
        Group { path: agent.clone(), settings: Vec::new() },
        Group { path: commands.clone(), settings: Vec::new() },
    ];
    let inherit = vec![
        (Descriptor::JoinCommands, commands.join("cgroup.procs"), true),
        (Descriptor::JoinAgent, agent.join("cgroup.procs"), true),
        (Descriptor::AgentProcs, agent.join("cgroup.procs"), false),
        (Descriptor::AgentKill, agent.join("cgroup.kill"), true),
        (Descriptor::OomCount, work.join("memory.events"), false),
    ];
    Groups { make, born_in: Some(supervisor), join: Vec::new(), inherit }
}

// Only the freezer tells agent and commands apart: fewer cgroups, and a limit counts both anyway.
fn v1(mounts: &BTreeMap<String, PathBuf>, below: &Path, limits: &Limits) -> Groups {
    let folder = |controller: &str| mounts[controller].join(below);
    let group = |controller: &str, name: &str, settings: Vec<Setting>| Group {
        path: folder(controller).join(name),
        settings,
    };
    let memory =
        |bytes: u64| vec![set("memory.limit_in_bytes", bytes), maybe("memory.memsw.limit_in_bytes", bytes)];
    // v1 counts what sockets hold apart from all other memory, and only where there is a limit.
    let work =
        [memory(limits.memory_bytes), vec![maybe("memory.kmem.tcp.limit_in_bytes", TCP_BYTES)]].concat();
    let quota = u64::from(limits.cpu_millis_per_second) * PERIOD_MICROS / 1000;
    let cpu = vec![set("cpu.cfs_period_us", PERIOD_MICROS), set("cpu.cfs_quota_us", quota)];
    let make = vec![
        group("cpu", "", Vec::new()),
        group("cpu", "work", cpu),
        group("freezer", "", Vec::new()),
        group("freezer", "work", Vec::new()),
        group("freezer", "work/agent", Vec::new()),
        group("freezer", "work/commands", Vec::new()),
        group("memory", "", Vec::new()),
        group("memory", "supervisor", memory(SUPERVISOR_MEMORY_BYTES)),
        group("memory", "work", work),
        group("pids", "", Vec::new()),
        group("pids", "supervisor", vec![set("pids.max", SUPERVISOR_PIDS)]),
        group("pids", "work", vec![set("pids.max", limits.pids)]),
    ];
    let join = vec![
        folder("cpu"),
        folder("freezer"),
        folder("memory").join("supervisor"),
        folder("pids").join("supervisor"),
    ];
    let freezer = folder("freezer").join("work");
    let mut inherit = Vec::new();
    for (descriptor, name) in [(Descriptor::JoinCommands, "commands"), (Descriptor::JoinAgent, "agent")] {
        inherit.push((descriptor, freezer.join(name).join("cgroup.procs"), true));
        for controller in ["cpu", "memory", "pids"] {
            inherit.push((descriptor, folder(controller).join("work/cgroup.procs"), true));
        }
    }
    inherit.push((Descriptor::AgentProcs, freezer.join("agent/cgroup.procs"), false));
    inherit.push((Descriptor::AgentFreezer, freezer.join("agent/freezer.state"), true));
    inherit.push((Descriptor::OomCount, folder("memory").join("work/memory.oom_control"), false));
    Groups { make, born_in: None, join, inherit }
}

impl Group {
    /// Makes it; an older one of the same name is used again.
    pub(crate) fn make(&self) -> Result<(), StepError> {
        make_folder(&self.path)?;
        self.set()
    }

    /// Writes its settings. The kernel keeps some in order (memory below memory and swap), so that one
    /// refused at first may pass after the others.
    pub(crate) fn set(&self) -> Result<(), StepError> {
        let write = |setting: &Setting| fs::write(self.path.join(&setting.file), &setting.value);
        let refused: Vec<&Setting> = self.settings.iter().filter(|setting| write(setting).is_err()).collect();
        for setting in refused {
            match write(setting) {
                Err(_) if setting.optional => {}
                result => {
                    result.doing(|| {
                        format!("write {} to {}", setting.value, self.path.join(&setting.file).display())
                    })?;
                }
            }
        }
        Ok(())
    }
}

fn make_folder(path: &Path) -> Result<(), StepError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.doing(|| format!("make cgroup {}", path.display())),
    }
}

/// Lets a v2 cgroup be divided. The host's root always can; in a container the root that is seen is an
/// ordinary cgroup and holds the container's processes, which the kernel allows in leaves only: there they
/// are moved into one. They stay within the container's limits.
fn divide(mount: &Path) -> Result<(), StepError> {
    let busy = |result: &io::Result<()>| {
        result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    };
    let mut result = hand_down(mount);
    let end = Instant::now() + DIVIDE;
    while busy(&result) && Instant::now() < end {
        let others = mount.join(OTHERS);
        make_folder(&others)?;
        for pid in processes(mount) {
            let _ = fs::write(others.join("cgroup.procs"), pid.as_raw_nonzero().to_string());
        }
        result = hand_down(mount);
        if busy(&result) {
            thread::sleep(Duration::from_millis(1));
        }
    }
    if busy(&result) {
        let why = "processes live in it that cannot be moved; \
            give Harvest a cgroup of its own (systemd: Delegate=yes, docker: --cgroupns=private)";
        return Err(StepError::new(
            format!("divide the cgroup {}", mount.display()),
            io::Error::new(io::ErrorKind::ResourceBusy, why),
        ));
    }
    result.doing(|| handing_down(mount))
}

fn hand_down(folder: &Path) -> io::Result<()> {
    let file = folder.join("cgroup.subtree_control");
    fs::write(&file, "+memory +pids")?;
    let _ = fs::write(&file, "+cpu");
    Ok(())
}

fn handing_down(folder: &Path) -> String {
    format!("hand memory and pids down in {} (is it delegated and writable?)", folder.display())
}

/// The processes in one cgroup, without those below it.
fn processes(folder: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "1 2 0:1 / /c/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
        1 2 0:1 / /c/memory rw - cgroup cgroup rw,memory\n\
        1 2 0:1 / /c/pids rw - cgroup cgroup rw,pids\n\
        1 2 0:1 / /c/freezer rw - cgroup cgroup rw,freezer\n\
        1 2 0:1 / /c/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn a_controller_less_v2_mount_beside_v1_is_passed_over() {
        let found = Hierarchy::from_mounts(V1, |_| "hugetlb".into()).unwrap();
        let Hierarchy::V1 { mounts } = found else { panic!("{found:?}") };
        assert_eq!(mounts["cpu"], Path::new("/c/cpu"));
    }

    #[test]
    fn controllers_that_are_mounted_together_are_one_folder() {
        let together = V1.replace("rw,cpu,cpuacct", "rw,cpu,memory").replace("rw,memory", "rw,blkio");
        let found = Hierarchy::from_mounts(&together, |_| String::new()).unwrap();
        assert_eq!(found.mounts(), ["/c/cpu", "/c/freezer", "/c/pids"].map(Path::new));
    }

    #[test]
    fn v2_is_used_when_it_has_memory_and_pids() {
        let found = Hierarchy::from_mounts(V1, |_| "cpu memory pids".into());
        assert_eq!(found, Some(Hierarchy::V2 { mount: "/c/unified".into() }));
    }

    #[test]
    fn a_host_without_a_needed_controller_is_refused() {
        let without = V1.replace("rw,pids", "rw,blkio");
        assert_eq!(Hierarchy::from_mounts(&without, |_| String::new()), None);
    }

    #[test]
    fn the_memory_limit_is_on_work_and_on_every_kind_of_host() {
        let limits = Limits { memory_bytes: 4096, cpu_millis_per_second: 500, pids: 7, ..Limits::default() };
        for (hierarchy, file) in [
            (Hierarchy::V2 { mount: "/c".into() }, "memory.max"),
            (Hierarchy::from_mounts(V1, |_| String::new()).unwrap(), "memory.limit_in_bytes"),
        ] {
            let make = hierarchy.groups("home", "part", &limits).make;
            let limited: Vec<_> = make
                .iter()
                .filter(|group| group.settings.contains(&set(file, 4096)))
                .map(|group| group.path.clone())
                .collect();
            assert_eq!(limited.len(), 1);
            assert!(limited[0].ends_with("home/part/work"), "{limited:?}");
        }
    }

    #[test]
    fn sockets_have_a_limit_of_their_own_where_the_memory_limit_does_not_count_them() {
        let v1 = Hierarchy::from_mounts(V1, |_| String::new()).unwrap();
        let make = v1.groups("home", "part", &Limits::default()).make;
        let work = make.iter().find(|group| group.path.ends_with("memory/home/part/work")).unwrap();
        assert!(work.settings.iter().any(|setting| setting.file == "memory.kmem.tcp.limit_in_bytes"));
    }

    #[test]
    fn parents_are_made_before_and_removed_after_their_children() {
        for hierarchy in
            [Hierarchy::V2 { mount: "/c".into() }, Hierarchy::from_mounts(V1, |_| String::new()).unwrap()]
        {
            let folders = hierarchy.folders("home", "part");
            for (number, folder) in folders.iter().enumerate() {
                assert!(folders[..number].iter().all(|earlier| !folder.starts_with(earlier)), "{folder:?}");
            }
        }
    }
}
