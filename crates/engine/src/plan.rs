//! How a sandbox comes to be, as data: the steps in their order, with everything a reader wants to
//! know and nothing that only exists at run time (pids, the id range). [`plan`] is pure; the zygote
//! carries the steps up to [`Step::Clone`] out, the new process those after it. What comes before
//! [`Step::Gate`] is the same for every sandbox with a door, so it may have been done ahead of time.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use harvest_proto::{
    SandboxId,
    launch::{DNS_ADDRESS, Descriptor, SYNTHETIC_PREFIX_BITS},
};
use serde::{Deserialize, Serialize};

use crate::{
    cgroup::{Group, Hierarchy},
    isolate::caps::Capability,
    sandbox::Record,
    spec::Network,
};

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

/// One step. Paths are the host's unless they say `inside`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Step {
    /// Make a cgroup and set its limits.
    MakeGroup(Group),
    /// Take a range of host ids nobody else on this host has.
    ClaimIds {
        /// How many.
        count: u32,
    },
    /// Use the ids that all sandboxes of this user share, as they are.
    ShareIds {
        /// How many.
        count: u32,
        /// How many processes may have one of them inside; the kernel counts by user namespace.
        processes: u32,
    },
    /// Make a user namespace that maps 0.. to the range, owned by an id that no other sandbox has.
    MakeUserNamespace,
    /// Start pid 1 in new namespaces, owned by the host so that nothing inside has power over them.
    Clone {
        /// Their kinds.
        namespaces: Vec<Namespace>,
        /// Born in this cgroup (v2); on v1 it joins as its first act.
        into: Option<PathBuf>,
    },
    /// Join these cgroups.
    JoinGroups {
        /// One per hierarchy.
        groups: Vec<PathBuf>,
    },
    /// Open a file for the supervisor.
    Inherit {
        /// What it is to the supervisor.
        descriptor: Descriptor,
        /// Which file.
        path: PathBuf,
        /// Opened for writing, else for reading.
        write: bool,
    },
    /// Hide the cgroups above.
    NewCgroupNamespace,
    /// The name of the machine inside.
    HostName {
        /// The name.
        name: String,
    },
    /// Bring loopback up with the synthetic range, redirect what goes there, bind the resolver.
    Loopback {
        /// The range's first address, where the resolver answers.
        address: Ipv4Addr,
        /// Bits of the range that are fixed.
        prefix: u8,
        /// The address's twin.
        twin: Ipv6Addr,
        /// How the redirect is made.
        redirect: Redirect,
    },
    /// Make the sandbox and all it starts a likelier victim than the host when memory runs out.
    OomScore {
        /// Added to the kernel's own score.
        adjust: i32,
    },
    /// Bind the bridge.
    Bridge,
    /// Open the folder of the gateway's socket.
    Door,
    /// Have the supervisor's output appended to its log.
    Log,
    /// Make the file by which pid 1 is asked to let its commands stand still, for want of a cgroup.
    Still,
    /// A private place to put mounts together.
    Scratch,
    /// Attach a layer, read-only and id-mapped.
    Layer {
        /// The layer's folder, handed over as this descriptor.
        from: Handed,
        /// Its name in the scratch place.
        name: String,
    },
    /// Attach the folder with `upper` and `work`, id-mapped.
    Writable,
    /// Put the layers on top of each other.
    Overlay {
        /// Names in the scratch place, top first.
        lowers: Vec<String>,
    },
    /// A `/proc` of its own.
    Proc,
    /// A `/dev` of its own.
    Dev {
        /// Devices by name, with their numbers.
        nodes: BTreeMap<String, (u32, u32)>,
    },
    /// What shared memory of the older kind may hold: it stays when whoever filled it has been killed.
    SharedMemory {
        /// All of it together.
        bytes: u64,
    },
    /// An empty, read-only folder over this one inside.
    Empty {
        /// Where.
        inside: PathBuf,
    },
    /// Nothing to see at these paths inside `/proc`.
    Mask {
        /// Relative to `/proc`; missing ones are passed over.
        paths: Vec<PathBuf>,
    },
    /// Nothing to write at these paths inside `/proc`.
    ReadOnly {
        /// Relative to `/proc`; missing ones are passed over.
        paths: Vec<PathBuf>,
    },
    /// A read-only file made for this sandbox.
    File {
        /// Where.
        inside: PathBuf,
        /// What it says.
        text: String,
    },
    /// Something of the host, read-only.
    Bind {
        /// What, handed over as this descriptor.
        from: Handed,
        /// Where.
        inside: PathBuf,
    },
    /// A volume, id-mapped.
    Volume {
        /// Mounted nowhere yet, handed over as this descriptor; its path is its name.
        from: Handed,
        /// Where.
        inside: PathBuf,
        /// Nothing to write.
        read_only: bool,
    },
    /// Put `/proc`, `/dev` and `/sys`, made ahead, into the overlay.
    Furnish,
    /// Memory that processes share by name.
    Shm {
        /// Its size.
        bytes: u64,
    },
    /// Wait until pid 1 starts no processes: the kernel gives a new root to every process there is, and one
    /// that is being started in that moment would keep the old root.
    Settle,
    /// Make the overlay the root, also of pid 1, and let go of everything else.
    Root,
    /// Split in two. Pid 1 goes on up to `exec`; the other process keeps the host's powers, takes the
    /// steps from the gate on and ends.
    Split,
    /// Go on only when the zygote has written down that pid 1 exists.
    Gate,
    /// Tell the supervisor which sandbox it is pid 1 of.
    Launch,
    /// Become root of the user namespace: from here on the host's powers are gone.
    EnterUserNamespace,
    /// Lower the limits every process inherits.
    ResourceLimits,
    /// Drop all capabilities but these, for good.
    Capabilities {
        /// Kept.
        keep: Vec<Capability>,
    },
    /// Nothing started from here on gains privileges.
    NoNewPrivileges,
    /// Refuse system calls that are not on the list.
    Seccomp,
    /// Become the supervisor, which prepares itself and waits for its launch.
    Exec,
}

/// A kind of namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the kernel's own names")]
pub enum Namespace {
    Mount,
    Pid,
    Net,
    Ipc,
    Uts,
}

/// Something of the host that its opener hands over, because the zygote's mount table lacks it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Its path where it was opened.
    pub path: PathBuf,
    /// Its number among the descriptors handed over.
    pub number: usize,
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
pub(crate) const NODES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

// Inherited by everything inside: when the whole host runs short of memory, sandboxes go before anything
// of the host. Within a sandbox the limit is on `work`, which pid 1 is not in, so it is never the one taken.
const OOM_SCORE: i32 = 400;

/// How many ids a sandbox has: every 16-bit id, `nobody` included.
pub const IDS: u32 = 65_536;

/// The steps to the sandbox `record` describes, given its layers' and binds' places on the host.
#[must_use]
pub(crate) fn plan(record: &Record, layers: &[PathBuf], facts: &HostFacts) -> Plan {
    let part = record.id.part();
    let groups = facts.cgroups.groups(&facts.group, part, &record.limits);
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
    steps.extend([Step::HostName { name: host_name(&record.id) }, Step::Bridge]);
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
    steps.extend([Step::Furnish, Step::Shm { bytes: memory / 2 }, Step::SharedMemory { bytes: memory / 4 }]);
    steps.extend(files(record, facts));
    steps.extend(record.binds.iter().enumerate().map(|(number, bind)| Step::Bind {
        from: Handed { path: bind.source.clone(), number: layers.len() + number },
        inside: bind.inside.clone(),
    }));
    steps.extend(volumes(record, layers.len() + record.binds.len()));
    steps.extend([Step::Settle, Step::Root, Step::EnterUserNamespace, Step::Launch]);
    Plan { sandbox: record.id.clone(), steps }
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
    steps.push(Step::Overlay { lowers: (0..layers.len()).rev().map(|number| number.to_string()).collect() });
    steps
}

/// What every sandbox has, whatever its image.
fn furniture() -> [Step; 6] {
    [
        Step::Scratch,
        Step::Proc,
        Step::Dev { nodes: NODES.map(|(name, major, minor)| (name.to_owned(), (major, minor))).into() },
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
mod tests {
    use super::*;
    use crate::spec::{Bind, ImageConfig, Limits, Owner, VolumeMount};
    use harvest_proto::Timestamp;

    fn record(network: Network) -> Record {
        Record {
            id: "sbx_0123456789ab".parse().unwrap(),
            layers: vec!["base".parse().unwrap(), "repo".parse().unwrap()],
            config: ImageConfig::default(),
            limits: Limits::default(),
            network,
            owner: Owner::Kept,
            binds: vec![Bind { source: "/etc/ssl".into(), inside: "/etc/ssl".into() }],
            volumes: vec![VolumeMount {
                name: "notes".parse().unwrap(),
                inside: "/mnt/notes".into(),
                read_only: true,
            }],
            file_bytes: Some(7),
            env: BTreeMap::new(),
            created_at: Timestamp::from_millis(0),
            sealed: false,
            of_sessions: false,
            again_at: None,
            snapshot: None,
            made_by: None,
        }
    }

    fn facts() -> HostFacts {
        HostFacts {
            cgroups: Hierarchy::V2 { mount: "/sys/fs/cgroup".into() },
            group: "harvest-0".into(),
            resolv_conf: "nameserver 192.0.2.1\n".into(),
            ids: Ids::Own,
            redirect: Redirect::Nftables,
        }
    }

    fn planned(network: Network) -> Plan {
        plan(&record(network), &["/l/base".into(), "/l/repo".into()], &facts())
    }

    fn at(plan: &Plan, wanted: impl Fn(&Step) -> bool) -> usize {
        plan.steps.iter().position(wanted).unwrap()
    }

    #[test]
    fn pid_1_mounts_nothing_after_the_hosts_powers_are_gone() {
        let plan = planned(Network::Door);
        let names: Vec<String> = plan
            .parts()
            .own
            .iter()
            .map(|step| serde_json::to_value(step).unwrap()["step"].as_str().unwrap().to_owned())
            .collect();
        let wanted = [
            "enter_user_namespace",
            "resource_limits",
            "capabilities",
            "no_new_privileges",
            "seccomp",
            "exec",
        ];
        assert_eq!(names, wanted);
    }

    #[test]
    fn nothing_that_tells_sandboxes_apart_is_done_before_the_gate() {
        let other = Record {
            id: "sbx_zzzzzzzzzzzz".parse().unwrap(),
            limits: Limits { memory_bytes: 1, cpu_millis_per_second: 1, pids: 1, ..Limits::default() },
            file_bytes: Some(1),
            env: [("A".to_owned(), "b".to_owned())].into(),
            ..record(Network::Door)
        };
        let facts = facts();
        let plans = [plan(&record(Network::Door), &["/l/base".into()], &facts), plan(&other, &[], &facts)];
        let before = plans.map(|plan| {
            let parts = plan.parts();
            let text = serde_json::to_string(&(parts.ahead, parts.own)).unwrap();
            text.replace(plan.sandbox.part(), "")
        });
        assert_eq!(before[0], before[1]);
    }

    #[test]
    fn the_supervisor_hears_whose_it_is_when_nobody_inside_has_the_hosts_powers() {
        let plan = planned(Network::Door);
        let called = plan.parts().called;
        assert!(
            called.ends_with(&[Step::Settle, Step::Root, Step::EnterUserNamespace, Step::Launch]),
            "{called:?}"
        );
    }

    #[test]
    fn only_the_hosts_network_leaves_out_the_net_namespace_and_the_loopback() {
        let has = |network, wanted: fn(&Step) -> bool| planned(network).steps.iter().any(wanted);
        let loopback: fn(&Step) -> bool = |step| matches!(step, Step::Loopback { .. });
        let net: fn(&Step) -> bool =
            |step| matches!(step, Step::Clone { namespaces, .. } if namespaces.contains(&Namespace::Net));
        assert!(has(Network::Door, loopback) && has(Network::Door, net));
        assert!(!has(Network::Host, loopback) && !has(Network::Host, net));
    }

    #[test]
    fn without_root_ids_are_shared_and_no_cgroup_is_needed() {
        let facts = HostFacts { cgroups: Hierarchy::None, ids: Ids::Shared, ..facts() };
        let plan = plan(&record(Network::Door), &["/l/base".into()], &facts);
        let pids = Limits::default().pids;
        assert_eq!(plan.steps[0], Step::ShareIds { count: IDS, processes: pids });
        assert!(!plan.steps.iter().any(|step| matches!(step, Step::MakeGroup(_) | Step::ClaimIds { .. })));
    }

    #[test]
    fn a_plan_says_how_this_host_redirects() {
        let facts = HostFacts { redirect: Redirect::Iptables, ..facts() };
        let plan = plan(&record(Network::Door), &[], &facts);
        assert!(plan.to_string().contains("redirect=\"iptables\""), "{plan}");
    }

    #[test]
    fn the_topmost_layer_comes_first_in_the_overlay() {
        let plan = planned(Network::Door);
        assert!(plan.steps.contains(&Step::Overlay { lowers: vec!["1".into(), "0".into()] }));
    }

    #[test]
    fn volumes_come_after_everything_they_could_be_hidden_by_and_before_the_root_is_entered() {
        let plan = planned(Network::Door);
        let volume = at(&plan, |step| matches!(step, Step::Volume { .. }));
        assert!(at(&plan, |step| matches!(step, Step::Bind { .. })) < volume);
        assert!(volume < at(&plan, |step| *step == Step::Root));
        let Step::Volume { from, .. } = &plan.steps[volume] else { unreachable!() };
        assert_eq!(from.number, 3, "two layers and a bind come before it");
    }

    #[test]
    fn a_plan_prints_one_line_per_step_and_survives_json() {
        let plan = planned(Network::Door);
        assert_eq!(plan.to_string().lines().count(), plan.steps.len() + 1);
        assert!(plan.to_string().contains("capabilities keep=[\"chown\""));
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }
}
