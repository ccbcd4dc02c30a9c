//! The plan of a sandbox as data: its steps in order, with everything worth reading and nothing
//! that exists only at run time (pids, the id range). [`plan`] is pure; the zygote runs the steps
//! up to [`Step::Clone`], the new process the rest. Steps before [`Step::AwaitAssignment`] are
//! equal for every sandbox with a door, so they can be done in advance.

mod capability;
mod step;
mod visible_limits;

use std::{
    fmt,
    net::Ipv6Addr,
    path::{Path, PathBuf},
};

use harvest_proto::{
    SandboxId,
    launch::{APP_FOLDER, DNS_ADDRESS, Descriptor, SETTINGS_FOLDER, SYNTHETIC_PREFIX_BITS},
    meminfo::MemoryUsage,
};
use serde::{Deserialize, Serialize};

use crate::{
    cgroup::Hierarchy,
    sandbox_record::Record,
    spec::{IDS_PER_SANDBOX, Network, Owner},
};
pub use capability::Capability;
pub use step::{Namespace, PassedDescriptor, Step};
use visible_limits::{cpuinfo, sys_files, visible_cpus};

/// The host's properties that a plan depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The cgroup hierarchy of this host.
    pub cgroups: Hierarchy,
    /// The cgroup of this home, relative to each hierarchy's mount.
    pub group: String,
    /// The host's own `resolv.conf`, for sandboxes that share its network.
    pub resolv_conf: String,
    /// How packets to the synthetic address range are redirected.
    pub redirect: Redirect,
    /// How sandboxes get their ids.
    pub ids: IdAllocation,
    /// What programs would see of the host's size.
    pub size: &'static HostSize,
}

/// The size of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostSize {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The CPUs that sandboxes may use.
    pub cpus: Vec<u32>,
    /// The text of `/proc/cpuinfo`.
    pub cpuinfo: String,
}

/// How sandboxes get their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdAllocation {
    /// One range per sandbox; needs root.
    PerSandbox,
    /// All sandboxes share the ids of the user who runs them.
    Shared,
}

/// A mechanism to redirect packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Redirect {
    /// The nftables interface.
    #[default]
    Nftables,
    /// iptables, for kernels whose nftables lack IPv4.
    Iptables,
}

/// The steps that create one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The sandbox to create.
    pub sandbox: SandboxId,
    /// The steps, in execution order.
    pub steps: Vec<Step>,
}

// In RFC 5180's benchmarking range, the IPv6 counterpart of 198.18.0.0/15.
pub(crate) const SYNTHETIC_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 1);

// Files that reveal the host or act on it. Most are already closed to unmapped ids; this is a
// second barrier.
const MASKED: [&str; 14] = [
    "acpi",
    "asound",
    "interrupts",
    "kallsyms",
    "kcore",
    "keys",
    "key-users",
    "kmsg",
    "latency_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
];

const READ_ONLY: [&str; 4] = ["bus", "fs", "irq", "sys"];

// Major and minor numbers of Linux's `Documentation/admin-guide/devices.txt`.
pub(crate) const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

// Inherited by all processes inside: when the host runs out of memory, sandboxes are killed before
// the host's processes. Within a sandbox the limit is on `work`, which does not contain pid 1.
const OOM_SCORE: i32 = 400;

/// Plans the sandbox that `record` describes; `layers` are the layers' paths on the host.
#[must_use]
pub(crate) fn plan(record: &Record, layers: &[PathBuf], facts: &HostFacts) -> Plan {
    let mut steps = spawn_steps(record, facts);
    steps.extend(system_mounts(record, facts));
    steps.extend([
        Step::Fork,
        Step::EnterUserNamespace,
        Step::ResourceLimits,
        Step::Capabilities { keep: Capability::SANDBOX.to_vec() },
        Step::NoNewPrivileges,
        Step::Seccomp,
        Step::Exec,
        Step::AwaitAssignment,
    ]);
    steps.extend(assigned_steps(record, layers, facts));
    Plan { sandbox: record.id.clone(), steps }
}

/// The steps to a process in its own namespaces and cgroups.
fn spawn_steps(record: &Record, facts: &HostFacts) -> Vec<Step> {
    let groups = facts.cgroups.groups(&facts.group, record.id.part(), &record.limits);
    let mut steps: Vec<Step> = groups.make.into_iter().map(Step::MakeGroup).collect();
    steps.push(match facts.ids {
        IdAllocation::PerSandbox => Step::ClaimIds { count: IDS_PER_SANDBOX },
        IdAllocation::Shared => {
            Step::ShareIds { count: IDS_PER_SANDBOX, processes: record.limits.pids }
        }
    });
    steps.push(Step::MakeUserNamespace);
    let mut namespaces = vec![Namespace::Mount, Namespace::Pid, Namespace::Ipc, Namespace::Uts];
    if record.network != Network::Host {
        namespaces.push(Namespace::Net);
    }
    steps.push(Step::Clone { namespaces, into: groups.clone_into });
    steps.push(Step::JoinGroups { groups: groups.join });
    steps.extend(groups.inherit.into_iter().map(|(descriptor, path, write)| Step::Inherit {
        descriptor,
        path,
        write,
    }));
    steps.push(Step::NewCgroupNamespace);
    if record.network != Network::Host {
        steps.push(Step::Loopback {
            address: DNS_ADDRESS,
            prefix: SYNTHETIC_PREFIX_BITS,
            ipv6: SYNTHETIC_IPV6,
            redirect: facts.redirect,
        });
    }
    steps.push(Step::OomScore { adjust: OOM_SCORE });
    steps
}

/// The steps that turn a prepared process into this sandbox.
fn assigned_steps(record: &Record, layers: &[PathBuf], facts: &HostFacts) -> Vec<Step> {
    let mut steps = vec![Step::HostName { name: host_name(&record.id) }, Step::Bridge];
    if record.network != Network::Host {
        steps.push(Step::Door);
    }
    steps.push(Step::Log);
    if facts.cgroups == Hierarchy::None {
        steps.push(Step::FreezeOrders);
    }
    steps.extend(disk(layers));
    // Both count as the sandbox's memory and outlive the processes that filled them. Even when
    // full, they leave memory for a command that empties them.
    let memory = record.limits.memory_bytes;
    steps.extend([
        Step::AssembleRoot,
        Step::Shm { bytes: memory / 2 },
        Step::SharedMemory { bytes: memory / 4 },
    ]);
    steps.extend(files(record, facts));
    let cpus = visible_cpus(&facts.size.cpus, &record.limits, record.id.part());
    steps.extend(limit_files(record, facts, &cpus));
    if record.owner == Owner::Sessions {
        let (inside, writer) = (APP_FOLDER.into(), Descriptor::App);
        steps.push(Step::Pid1Folder { inside, writer });
    }
    if !record.settings.is_empty() {
        let (inside, writer) = (SETTINGS_FOLDER.into(), Descriptor::Settings);
        steps.push(Step::Pid1Folder { inside, writer });
    }
    steps.extend(record.binds.iter().enumerate().map(|(number, bind)| Step::Bind {
        from: PassedDescriptor { path: bind.source.clone(), number: layers.len() + number },
        inside: bind.inside.clone(),
    }));
    steps.extend(volumes(record, layers.len() + record.binds.len()));
    // Every sandbox of the host would be confined to the same CPUs as the zygote anyway.
    let cpus = if cpus == facts.size.cpus { Vec::new() } else { cpus };
    steps.extend([Step::Settle, Step::Root, Step::EnterUserNamespace, Step::Launch { cpus }]);
    steps
}

/// Files that show the limits where programs look for the size of their machine.
fn limit_files(record: &Record, facts: &HostFacts, cpus: &[u32]) -> Vec<Step> {
    let limits = &record.limits;
    let file = |inside: &str, text, writer| Step::File { inside: inside.into(), text, writer };
    let mut steps = vec![Step::SysFiles { files: sys_files(limits, &facts.cgroups, cpus) }];
    // Without cgroups memory is not limited.
    if facts.cgroups != Hierarchy::None && limits.memory_bytes < facts.size.memory_bytes {
        let memory = MemoryUsage { total: limits.memory_bytes, ..MemoryUsage::default() };
        steps.push(file("/proc/meminfo", memory.meminfo(), Some(Descriptor::Meminfo)));
    }
    if cpus != facts.size.cpus {
        steps.push(file("/proc/cpuinfo", cpuinfo(&facts.size.cpuinfo, cpus), None));
    }
    steps
}

fn volumes(record: &Record, first: usize) -> impl Iterator<Item = Step> {
    record.volumes.iter().enumerate().map(move |(number, volume)| Step::Volume {
        from: PassedDescriptor { path: volume.name.as_str().into(), number: first + number },
        inside: volume.inside.clone(),
        read_only: volume.read_only,
    })
}

fn disk(layers: &[PathBuf]) -> Vec<Step> {
    let attach = |(number, path): (usize, &PathBuf)| Step::Layer {
        from: PassedDescriptor { path: path.clone(), number },
        name: number.to_string(),
    };
    let mut steps: Vec<Step> = layers.iter().enumerate().map(attach).collect();
    steps.push(Step::Writable);
    steps.push(Step::Overlay {
        lowers: (0..layers.len()).rev().map(|number| number.to_string()).collect(),
    });
    steps
}

/// Mounts that every sandbox has, whatever its image.
fn system_mounts(record: &Record, facts: &HostFacts) -> [Step; 6] {
    [
        Step::Scratch,
        Step::Proc,
        Step::Dev {
            nodes: NODES.map(|(name, major, minor)| (name.to_owned(), (major, minor))).into(),
        },
        Step::Sys(facts.cgroups.view(&facts.group, record.id.part())),
        Step::Mask { paths: MASKED.map(PathBuf::from).into() },
        Step::ReadOnly { paths: READ_ONLY.map(PathBuf::from).into() },
    ]
}

fn files(record: &Record, facts: &HostFacts) -> [Step; 3] {
    let name = host_name(&record.id);
    let resolv_conf = match record.network {
        Network::Door | Network::Nothing => {
            format!("nameserver {DNS_ADDRESS}\noptions timeout:5 attempts:2\n")
        }
        Network::Host => facts.resolv_conf.clone(),
    };
    let file = |inside: &str, text| Step::File { inside: inside.into(), text, writer: None };
    [
        file("/etc/resolv.conf", resolv_conf),
        file("/etc/hosts", format!("127.0.0.1 localhost {name}\n::1 localhost\n")),
        file("/etc/hostname", format!("{name}\n")),
    ]
}

/// The sandbox's host name.
fn host_name(id: &SandboxId) -> String {
    format!("sbx-{}", id.part())
}

/// A plan's steps by the process that runs them.
pub(crate) struct PlanParts<'a> {
    /// The zygote.
    pub(crate) zygote: &'a [Step],
    /// Pid 1 before the fork.
    pub(crate) before_fork: &'a [Step],
    /// Pid 1 after the fork.
    pub(crate) pid1: &'a [Step],
    /// The forked process, once it has its assignment.
    pub(crate) assigned: &'a [Step],
}

impl Plan {
    /// Splits the steps by the process that runs them.
    pub(crate) fn parts(&self) -> PlanParts<'_> {
        let after = |wanted: fn(&Step) -> bool| {
            self.steps.iter().position(wanted).map_or(self.steps.len(), |at| at + 1)
        };
        let clone = after(|step| matches!(step, Step::Clone { .. }));
        let (fork, assignment) =
            (after(|step| *step == Step::Fork), after(|step| *step == Step::AwaitAssignment));
        PlanParts {
            zygote: &self.steps[..clone],
            before_fork: &self.steps[clone..fork - 1],
            pid1: &self.steps[fork..assignment - 1],
            assigned: &self.steps[assignment..],
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}", self.sandbox)?;
        for (number, step) in self.steps.iter().enumerate() {
            let line = serde_json::to_value(step).map_err(|_| fmt::Error)?;
            let name = line["step"].as_str().unwrap_or_default().to_owned();
            write!(out, "{:>3} {name}", number + 1)?;
            let fields = line.as_object().into_iter().flatten().filter(|(key, _)| *key != "step");
            for (key, value) in fields {
                write!(out, " {key}={value}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

/// A path inside, relative to the root.
pub(crate) fn below_root(inside: &Path) -> &Path {
    inside.strip_prefix("/").unwrap_or(inside)
}

#[cfg(test)]
mod tests;
