//! What a supervisor is born with. The engine starts it with one end of a Unix socket pair as its
//! standard input. There comes a [`Launch`] as JSON with the descriptors it names attached, in order;
//! before it may come a [`Cradle`], when the supervisor is started ahead of time. Nothing is passed by
//! number or path, so the supervisor needs no unsafe code to pick them up and no host path is visible
//! inside.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::SandboxId;

/// The name of the gateway's socket in the folder [`Descriptor::Door`] opens.
pub const DOOR_SOCKET: &str = "door.sock";

/// The address the sandbox's own resolver answers on; also in its `resolv.conf`.
pub const DNS_ADDRESS: std::net::Ipv4Addr = std::net::Ipv4Addr::new(198, 18, 0, 1);

/// The first two bytes of every synthetic address are 198.18 or 198.19.
pub const SYNTHETIC_PREFIX_BITS: u8 = 15;

/// Tells pid 1 (SIGUSR1) to read the order in [`Descriptor::Still`], where the host has no cgroup to freeze.
pub const STILL_SIGNAL: i32 = 10;

/// What a supervisor gets ahead of time, when nobody knows yet which sandbox it will be pid 1 of: it
/// prepares what is the same for all, and waits for its launch. When it starts no more processes of its
/// own accord it shuts its end down for writing; until then nobody may change the root of its mounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cradle {
    /// What the attached descriptors are, in their order.
    pub cradle: Vec<Descriptor>,
}

/// A supervisor's inheritance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The sandbox it is pid 1 of.
    pub sandbox: SandboxId,
    /// What the attached descriptors are, in their order.
    pub descriptors: Vec<Descriptor>,
    /// The image's variables: what every command gets.
    pub env: BTreeMap<String, String>,
    /// The image's user: who commands run as unless they say otherwise.
    pub user: String,
    /// The image's working folder.
    pub workdir: String,
    /// No gateway will ever serve this sandbox: names are refused at once instead of waiting for one.
    #[serde(default)]
    pub sealed: bool,
    /// No file may become larger, whoever writes it.
    #[serde(default)]
    pub file_bytes: Option<u64>,
}

/// What an inherited descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Descriptor {
    /// A listening Unix stream socket: the bridge.
    Bridge,
    /// A folder (detached, so that nothing lies above it) that holds [`DOOR_SOCKET`] while a gateway
    /// serves this sandbox. Absent together with the next three where the host's network is used.
    Door,
    /// A UDP socket bound to port 53 of [`DNS_ADDRESS`].
    DnsUdp,
    /// A listening TCP socket there.
    DnsTcp,
    /// The listening TCP socket to which the kernel redirects every connection to a synthetic
    /// address; `SO_ORIGINAL_DST` tells which address was meant.
    Redirect,
    /// `cgroup.procs` of the commands' cgroup; whoever writes `0` joins. One per hierarchy on v1.
    JoinCommands,
    /// The same for the agent's own cgroup.
    JoinAgent,
    /// `cgroup.procs` of the agent's cgroup, to read: empty is the proof that everything the agent
    /// started is dead.
    AgentProcs,
    /// `cgroup.kill` of the agent's cgroup (v2 only).
    AgentKill,
    /// `freezer.state` of the agent's cgroup (v1 only).
    AgentFreezer,
    /// A file to read and write, in place of a cgroup that could be frozen or killed. Its first eight
    /// bytes, in the machine's order, are the engine's: a number that rises with each order, whose last
    /// two bits say what is to become of everything but pid 1: 0 go on, 1 stand still, 2 die. The next
    /// eight are pid 1's: the last order it has carried out.
    Still,
    /// Has a line `oom_kill N`: how many processes the memory limit has killed
    /// (`memory.events` on v2, `memory.oom_control` on v1).
    OomCount,
    /// The sandbox's `/dev/null`, in a cradle: without a root there is none to open.
    Null,
    /// Where diagnostics go, after a cradle; else standard error is the place already.
    Log,
}
