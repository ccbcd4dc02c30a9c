//! The words a plan is written in: every step there is, with what it needs to know.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use harvest_proto::launch::Descriptor;
use serde::{Deserialize, Serialize};

use super::Redirect;
use crate::{cgroup::Group, isolate::caps::Capability};

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
