//! Every kind of step in a plan, with its parameters.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use harvest_proto::launch::Descriptor;
use serde::{Deserialize, Serialize};

use super::{Capability, Redirect};
use crate::cgroup::{CgroupView, Group};

/// One step. Paths are the host's unless the field is called `inside`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Step {
    /// Make a cgroup and set its limits.
    MakeGroup(Group),
    /// Claim a range of host ids that no other sandbox on this host uses.
    ClaimIds {
        /// Number of ids.
        count: u32,
    },
    /// Use the ids that all sandboxes of this user share, as they are.
    ShareIds {
        /// Number of ids.
        count: u32,
        /// Process limit; the kernel counts processes per user namespace.
        processes: u32,
    },
    /// Create a user namespace that maps 0 and up to the range, owned by an id that no other
    /// sandbox has.
    MakeUserNamespace,
    /// Start pid 1 in new namespaces, owned by the host so that no process inside can change them.
    Clone {
        /// Kinds of namespaces.
        namespaces: Vec<Namespace>,
        /// Start in this cgroup (v2); on v1 pid 1 joins its cgroups first.
        into: Option<PathBuf>,
    },
    /// Join these cgroups.
    JoinGroups {
        /// One per hierarchy.
        groups: Vec<PathBuf>,
    },
    /// Open a file for the supervisor.
    Inherit {
        /// Its role for the supervisor.
        descriptor: Descriptor,
        /// The file.
        path: PathBuf,
        /// Opened for writing, else for reading.
        write: bool,
    },
    /// Hide the cgroups above.
    NewCgroupNamespace,
    /// Set the host name inside.
    HostName {
        /// Host name.
        name: String,
    },
    /// Bring loopback up with the synthetic address range, redirect connections to it, bind the
    /// resolver.
    Loopback {
        /// The range's first address, where the resolver answers.
        address: Ipv4Addr,
        /// Prefix length of the range.
        prefix: u8,
        /// The resolver's IPv6 address.
        ipv6: Ipv6Addr,
        /// The redirect mechanism.
        redirect: Redirect,
    },
    /// Make the sandbox's processes more likely OOM victims than the host's.
    OomScore {
        /// Added to the kernel's own score.
        adjust: i32,
    },
    /// Bind the bridge.
    Bridge,
    /// Open the folder of the gateway's socket.
    Door,
    /// Open the supervisor's log for appending.
    Log,
    /// Create the file of freeze orders to pid 1, where there is no cgroup.
    FreezeOrders,
    /// Mount the scratch tmpfs in which mounts are assembled.
    Scratch,
    /// Attach a layer, read-only and id-mapped.
    Layer {
        /// The layer's folder, passed as this descriptor.
        from: PassedDescriptor,
        /// Its name in the scratch tmpfs.
        name: String,
    },
    /// Attach the folder with `upper` and `work`, id-mapped.
    Writable,
    /// Mount the layers as an overlay.
    Overlay {
        /// Names in the scratch tmpfs, top first.
        lowers: Vec<String>,
    },
    /// Mount a private `/proc`.
    Proc,
    /// Mount a private `/dev`.
    Dev {
        /// Device nodes by name, with major and minor number.
        nodes: BTreeMap<String, (u32, u32)>,
    },
    /// Limit System V shared memory, which outlives the processes that created it.
    SharedMemory {
        /// Limit of all segments together.
        bytes: u64,
    },
    /// Mount a `/sys` that shows the sandbox's own cgroups and nothing of the host.
    Sys(CgroupView),
    /// Write the files of `/sys`, then make it read-only.
    SysFiles {
        /// Content by path below `/sys`.
        files: BTreeMap<PathBuf, String>,
    },
    /// Hide these paths inside `/proc`.
    Mask {
        /// Relative to `/proc`; missing ones are passed over.
        paths: Vec<PathBuf>,
    },
    /// Make these paths inside `/proc` read-only.
    ReadOnly {
        /// Relative to `/proc`; missing ones are passed over.
        paths: Vec<PathBuf>,
    },
    /// Mount a read-only file generated for this sandbox.
    File {
        /// Path inside the sandbox.
        inside: PathBuf,
        /// Its content.
        text: String,
        /// The supervisor may change it through this descriptor.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        writer: Option<Descriptor>,
    },
    /// Mount a small file system that only pid 1 can write, through a descriptor.
    Pid1Folder {
        /// Path inside the sandbox.
        inside: PathBuf,
        /// The descriptor.
        writer: Descriptor,
    },
    /// Mount a file or folder of the host, read-only.
    Bind {
        /// The source, passed as this descriptor.
        from: PassedDescriptor,
        /// Path inside the sandbox.
        inside: PathBuf,
    },
    /// Mount a volume, id-mapped.
    Volume {
        /// A detached mount, passed as this descriptor; its path is the volume's name.
        from: PassedDescriptor,
        /// Path inside the sandbox.
        inside: PathBuf,
        /// Mount it read-only.
        read_only: bool,
    },
    /// Move the prepared `/proc`, `/dev` and `/sys` into the overlay.
    AssembleRoot,
    /// Mount `/dev/shm`.
    Shm {
        /// Size limit.
        bytes: u64,
    },
    /// Wait until pid 1 starts no processes: `pivot_root` changes the root of every existing
    /// process, and one being forked at that moment would keep the old root.
    Settle,
    /// Make the overlay the root, also of pid 1, and unmount everything else.
    Root,
    /// Fork. Pid 1 continues up to `exec`; the other process keeps the host's privileges, runs the
    /// steps after the assignment and exits.
    Fork,
    /// Wait until the zygote has recorded pid 1 and sends the assignment.
    AwaitAssignment,
    /// Tell the supervisor which sandbox it is pid 1 of.
    Launch {
        /// The CPUs that its commands run on by default; all if empty.
        cpus: Vec<u32>,
    },
    /// Become root of the user namespace; the host's privileges are dropped.
    EnterUserNamespace,
    /// Lower the limits every process inherits.
    ResourceLimits,
    /// Drop all capabilities but these, irrevocably.
    Capabilities {
        /// Capabilities to keep.
        keep: Vec<Capability>,
    },
    /// Set `no_new_privs`.
    NoNewPrivileges,
    /// Install the seccomp filter.
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

/// A file or mount that the engine opens and passes to the zygote, whose mount table lacks it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedDescriptor {
    /// Its path on the host.
    pub path: PathBuf,
    /// Its index among the passed descriptors.
    pub number: usize,
}
