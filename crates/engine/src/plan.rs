//! How a sandbox comes to be, as data: the steps in their order, with everything a reader wants to
//! know and nothing that only exists at run time (pids, the id range). [`plan`] is pure; the zygote
//! carries the steps up to [`Step::Clone`] out, the new process those after it. What comes before
//! [`Step::Gate`] is the same for every sandbox with a door, so it may have been done ahead of time.

mod step;

use std::{
    fmt,
    net::Ipv6Addr,
    path::{Path, PathBuf},
};

use harvest_proto::{
    SandboxId,
    launch::{DNS_ADDRESS, SYNTHETIC_PREFIX_BITS},
};
use serde::{Deserialize, Serialize};

use crate::{cgroup::Hierarchy, isolate::caps::Capability, sandbox::Record, spec::Network};
pub use step::{Handed, Namespace, Step};

/// What a plan depends on besides the spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The kind of cgroups this host has, and where.
    pub cgroups: Hierarchy,
    /// The cgroup of this home, relative to each hierarchy's mount.
    pub group: String,
    /// The host's own `resolv.conf`, for sandboxes that share its network.
    pub resolv_conf: String,
    /// How packets to the synthetic range are redirected.
    pub redirect: Redirect,
    /// Whose ids sandboxes have.
    pub ids: Ids,
}

/// Whose ids sandboxes have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ids {
    /// Each its own: what root can give.
    Own,
    /// All those of the user who runs them.
    Shared,
}

/// A way to redirect packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Redirect {
    /// The kernel's present packet rules.
    #[default]
    Nftables,
    /// Its older ones, for kernels whose nftables know no IPv4.
    Iptables,
}

/// The way to one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Which.
    pub sandbox: SandboxId,
    /// In this order.
    pub steps: Vec<Step>,
}

// RFC 5180's range for benchmarks, the IPv6 sister of 198.18.0.0/15.
pub(crate) const TWIN: Ipv6Addr = Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 1);

// What tells of the host or acts on it. Most of it is closed to unmapped ids already; two walls.
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

// Inherited by everything inside: when the whole host runs short of memory, sandboxes go before anything
// of the host. Within a sandbox the limit is on `work`, which pid 1 is not in, so it is never the one taken.
const OOM_SCORE: i32 = 400;

/// How many ids a sandbox has: every 16-bit id, `nobody` included.
pub const IDS: u32 = 65_536;

/// The steps to the sandbox `record` describes, given its layers' and binds' places on the host.
#[must_use]
pub(crate) fn plan(record: &Record, layers: &[PathBuf], facts: &HostFacts) -> Plan {
    let mut steps = birth(record, facts);
    steps.extend(furniture());
    steps.extend([
        Step::Split,
        Step::EnterUserNamespace,
        Step::ResourceLimits,
        Step::Capabilities { keep: Capability::ROLE.to_vec() },
        Step::NoNewPrivileges,
        Step::Seccomp,
        Step::Exec,
        Step::Gate,
    ]);
    steps.extend(called(record, layers, facts));
    Plan { sandbox: record.id.clone(), steps }
}

/// To a process in namespaces and cgroups of its own.
fn birth(record: &Record, facts: &HostFacts) -> Vec<Step> {
    let groups = facts.cgroups.groups(&facts.group, record.id.part(), &record.limits);
    let mut steps: Vec<Step> = groups.make.into_iter().map(Step::MakeGroup).collect();
    steps.push(match facts.ids {
        Ids::Own => Step::ClaimIds { count: IDS },
        Ids::Shared => Step::ShareIds { count: IDS, processes: record.limits.pids },
    });
    steps.push(Step::MakeUserNamespace);
    let mut namespaces = vec![Namespace::Mount, Namespace::Pid, Namespace::Ipc, Namespace::Uts];
    if record.network == Network::Door {
        namespaces.push(Namespace::Net);
    }
    steps.push(Step::Clone { namespaces, into: groups.born_in });
    steps.push(Step::JoinGroups { groups: groups.join });
    steps.extend(groups.inherit.into_iter().map(|(descriptor, path, write)| Step::Inherit {
        descriptor,
        path,
        write,
    }));
    steps.push(Step::NewCgroupNamespace);
    if record.network == Network::Door {
        steps.push(Step::Loopback {
            address: DNS_ADDRESS,
            prefix: SYNTHETIC_PREFIX_BITS,
            twin: TWIN,
            redirect: facts.redirect,
        });
    }
    steps.push(Step::OomScore { adjust: OOM_SCORE });
    steps
}

/// What makes it this sandbox.
fn called(record: &Record, layers: &[PathBuf], facts: &HostFacts) -> Vec<Step> {
    let mut steps = vec![Step::HostName { name: host_name(&record.id) }, Step::Bridge];
    if record.network == Network::Door {
        steps.push(Step::Door);
    }
    steps.push(Step::Log);
    if facts.cgroups == Hierarchy::None {
        steps.push(Step::Still);
    }
    steps.extend(disk(layers));
    // Both kinds count as the sandbox's memory and outlive who wrote to them. Full, they must leave room for
    // a command that empties them.
    let memory = record.limits.memory_bytes;
    steps.extend([
        Step::Furnish,
        Step::Shm { bytes: memory / 2 },
        Step::SharedMemory { bytes: memory / 4 },
    ]);
    steps.extend(files(record, facts));
    steps.extend(record.binds.iter().enumerate().map(|(number, bind)| Step::Bind {
        from: Handed { path: bind.source.clone(), number: layers.len() + number },
        inside: bind.inside.clone(),
    }));
    steps.extend(volumes(record, layers.len() + record.binds.len()));
    steps.extend([Step::Settle, Step::Root, Step::EnterUserNamespace, Step::Launch]);
    steps
}

fn volumes(record: &Record, first: usize) -> impl Iterator<Item = Step> {
    record.volumes.iter().enumerate().map(move |(number, volume)| Step::Volume {
        from: Handed { path: volume.name.as_str().into(), number: first + number },
        inside: volume.inside.clone(),
        read_only: volume.read_only,
    })
}

fn disk(layers: &[PathBuf]) -> Vec<Step> {
    let attach = |(number, path): (usize, &PathBuf)| Step::Layer {
        from: Handed { path: path.clone(), number },
        name: number.to_string(),
    };
    let mut steps: Vec<Step> = layers.iter().enumerate().map(attach).collect();
    steps.push(Step::Writable);
    steps.push(Step::Overlay {
        lowers: (0..layers.len()).rev().map(|number| number.to_string()).collect(),
    });
    steps
}

/// What every sandbox has, whatever its image.
fn furniture() -> [Step; 6] {
    [
        Step::Scratch,
        Step::Proc,
        Step::Dev {
            nodes: NODES.map(|(name, major, minor)| (name.to_owned(), (major, minor))).into(),
        },
        Step::Empty { inside: "/sys".into() },
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
    let file = |inside: &str, text: String| Step::File { inside: inside.into(), text };
    [
        file("/etc/resolv.conf", resolv_conf),
        file("/etc/hosts", format!("127.0.0.1 localhost {name}\n::1 localhost\n")),
        file("/etc/hostname", format!("{name}\n")),
    ]
}

/// What the machine inside calls itself.
fn host_name(id: &SandboxId) -> String {
    format!("sbx-{}", id.part())
}

/// Who takes which steps of a plan.
pub(crate) struct Parts<'a> {
    /// The zygote.
    pub(crate) zygote: &'a [Step],
    /// Pid 1, before it splits.
    pub(crate) ahead: &'a [Step],
    /// Pid 1, after that.
    pub(crate) own: &'a [Step],
    /// The other process, once it is called.
    pub(crate) called: &'a [Step],
}

impl Plan {
    /// The steps by who takes them.
    pub(crate) fn parts(&self) -> Parts<'_> {
        let after = |wanted: fn(&Step) -> bool| {
            self.steps.iter().position(wanted).map_or(self.steps.len(), |at| at + 1)
        };
        let clone = after(|step| matches!(step, Step::Clone { .. }));
        let (split, gate) = (after(|step| *step == Step::Split), after(|step| *step == Step::Gate));
        Parts {
            zygote: &self.steps[..clone],
            ahead: &self.steps[clone..split - 1],
            own: &self.steps[split..gate - 1],
            called: &self.steps[gate..],
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

/// Where a path lies below the root inside, without the leading slash.
pub(crate) fn below_root(inside: &Path) -> &Path {
    inside.strip_prefix("/").unwrap_or(inside)
}

#[cfg(test)]
mod tests;
