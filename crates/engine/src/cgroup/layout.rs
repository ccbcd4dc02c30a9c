//! The cgroups of a sandbox and their settings, on v1 and on v2.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use harvest_proto::launch::Descriptor;
use serde::{Deserialize, Serialize};

use super::ACCOUNTING;
use crate::{
    error::{Doing, StepError},
    spec::Limits,
};

/// A cgroup to create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its folder.
    pub path: PathBuf,
    /// Files to write, in order.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub settings: Vec<Setting>,
}

/// A setting of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The file's name.
    pub file: String,
    /// The value to write.
    pub value: String,
    /// The kernel may lack this file.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub optional: bool,
}

/// The cgroups of one sandbox, for a plan.
#[derive(Default)]
pub(crate) struct SandboxGroups {
    pub(crate) make: Vec<Group>,
    pub(crate) clone_into: Option<PathBuf>,
    pub(crate) join: Vec<PathBuf>,
    pub(crate) inherit: Vec<(Descriptor, PathBuf, bool)>,
}

/// The cgroups that a sandbox sees below `/sys`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupView {
    /// Cgroups to mount read-only, by their path inside.
    pub groups: BTreeMap<PathBuf, PathBuf>,
    /// Symbolic links, by their path inside.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// v1 controllers whose mounts must exist for a JVM to look at any; they show nothing.
    pub empty_controllers: Vec<String>,
}

// Pid 1 holds outboxes and stream windows, a few MiB; this stops a leak, not a normal day.
const SUPERVISOR_MEMORY_BYTES: u64 = 256 << 20;
// Room for the moment between fork and joining `work`.
const SUPERVISOR_PIDS: u32 = 512;
// TCP buffers are limited for the whole host, to a tenth of its memory: without its own limit one
// sandbox could use all of it. This is enough for a hundred connections.
const TCP_BYTES: u64 = 256 << 20;
// 100 ms: the kernel's default, long enough not to stutter, short enough to be fair.
const PERIOD_MICROS: u64 = 100_000;

pub(super) fn v2(folder: &Path, limits: &Limits) -> SandboxGroups {
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
        (Descriptor::MemoryUsed, work.join("memory.current"), false),
        (Descriptor::MemoryStat, work.join("memory.stat"), false),
    ];
    SandboxGroups { make, clone_into: Some(supervisor), join: Vec::new(), inherit }
}

// `/proc/self/cgroup` is relative to the supervisor's cgroup: `/../work/agent`. Programs append
// that to `/sys/fs/cgroup`, so the links lead them to the cgroup with the limits.
pub(super) fn v2_view(folder: &Path) -> CgroupView {
    let link = |name| (Path::new("/sys/fs/work").join(name), "/sys/fs/cgroup".into());
    CgroupView {
        groups: [("/sys/fs/cgroup".into(), folder.join("work"))].into(),
        links: ["agent", "commands"].map(link).into(),
        empty_controllers: Vec::new(),
    }
}

pub(super) fn v1_view(mounts: &BTreeMap<String, PathBuf>, below: &Path) -> CgroupView {
    let group = |controller: &str| {
        let inside = Path::new("/sys/fs/cgroup").join(controller);
        (inside, mounts[controller].join(below).join("work"))
    };
    CgroupView {
        groups: ["cpu", "memory", "pids"].map(group).into(),
        links: BTreeMap::new(),
        empty_controllers: ["cpuacct", "cpuset"].map(str::to_owned).into(),
    }
}

// Only the freezer separates agent and commands: fewer cgroups, and limits count both anyway.
pub(super) fn v1(
    mounts: &BTreeMap<String, PathBuf>,
    below: &Path,
    limits: &Limits,
) -> SandboxGroups {
    let folder = |controller: &str| mounts[controller].join(below);
    let group = |controller: &str, name: &str, settings: Vec<Setting>| Group {
        path: folder(controller).join(name),
        settings,
    };
    let memory = |bytes: u64| {
        vec![set("memory.limit_in_bytes", bytes), maybe("memory.memsw.limit_in_bytes", bytes)]
    };
    // v1 counts socket buffers separately from other memory, and only where there is a limit.
    let work =
        [memory(limits.memory_bytes), vec![maybe("memory.kmem.tcp.limit_in_bytes", TCP_BYTES)]]
            .concat();
    let quota = u64::from(limits.cpu_millis_per_second) * PERIOD_MICROS / 1000;
    let cpu = vec![set("cpu.cfs_period_us", PERIOD_MICROS), set("cpu.cfs_quota_us", quota)];
    let mut make = vec![
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
    let mut join = vec![
        folder("cpu"),
        folder("freezer"),
        folder("memory").join("supervisor"),
        folder("pids").join("supervisor"),
    ];
    // One cgroup counts the CPU time of pid 1 and of everything it starts.
    if mounts.get(ACCOUNTING).is_some_and(|mount| *mount != mounts["cpu"]) {
        make.push(group(ACCOUNTING, "", Vec::new()));
        join.push(folder(ACCOUNTING));
    }
    let freezer = folder("freezer").join("work");
    let mut inherit = Vec::new();
    for (descriptor, name) in
        [(Descriptor::JoinCommands, "commands"), (Descriptor::JoinAgent, "agent")]
    {
        inherit.push((descriptor, freezer.join(name).join("cgroup.procs"), true));
        for controller in ["cpu", "memory", "pids"] {
            inherit.push((descriptor, folder(controller).join("work/cgroup.procs"), true));
        }
    }
    inherit.push((Descriptor::AgentProcs, freezer.join("agent/cgroup.procs"), false));
    inherit.push((Descriptor::AgentFreezer, freezer.join("agent/freezer.state"), true));
    for (descriptor, name) in [
        (Descriptor::OomCount, "memory.oom_control"),
        (Descriptor::MemoryUsed, "memory.usage_in_bytes"),
        (Descriptor::MemoryStat, "memory.stat"),
    ] {
        inherit.push((descriptor, folder("memory").join("work").join(name), false));
    }
    SandboxGroups { make, clone_into: None, join, inherit }
}

impl Group {
    /// Creates the cgroup; an existing one is reused.
    pub(crate) fn make(&self) -> Result<(), StepError> {
        make_folder(&self.path)?;
        self.set()
    }

    /// Writes the settings. The kernel requires memory <= memory plus swap, so a value refused at
    /// first may be accepted after the others.
    pub(crate) fn set(&self) -> Result<(), StepError> {
        let write = |setting: &Setting| fs::write(self.path.join(&setting.file), &setting.value);
        let refused: Vec<&Setting> =
            self.settings.iter().filter(|setting| write(setting).is_err()).collect();
        for setting in refused {
            match write(setting) {
                Err(_) if setting.optional => {}
                result => result.doing(|| {
                    let file = self.path.join(&setting.file);
                    format!("write {} to {}", setting.value, file.display())
                })?,
            }
        }
        Ok(())
    }
}

pub(super) fn set(file: &str, value: impl ToString) -> Setting {
    Setting { file: file.to_owned(), value: value.to_string(), optional: false }
}

fn maybe(file: &str, value: impl ToString) -> Setting {
    Setting { optional: true, ..set(file, value) }
}

pub(super) fn make_folder(path: &Path) -> Result<(), StepError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.doing(|| format!("create cgroup {}", path.display())),
    }
}
