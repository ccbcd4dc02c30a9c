//! What a supervisor receives at its start. The engine starts it with one end of a Unix socket pair
//! as standard input. A [`Launch`] arrives there as JSON with the descriptors it names attached, in
//! order; a preforked supervisor gets an [`EarlyLaunch`] before it. Nothing is passed by number or
//! path, so the supervisor needs no unsafe code to receive it and no host path is visible inside.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::SandboxId;

/// File name of the gateway's socket in the folder [`Descriptor::Door`] opens.
pub const DOOR_SOCKET: &str = "door.sock";

/// The address of the sandbox's resolver; also in its `resolv.conf`.
pub const DNS_ADDRESS: std::net::Ipv4Addr = std::net::Ipv4Addr::new(198, 18, 0, 1);

/// Prefix length of the synthetic range: every address in it starts with 198.18 or 198.19.
pub const SYNTHETIC_PREFIX_BITS: u8 = 15;

/// The signal (SIGUSR1) that tells pid 1 to read an order from [`Descriptor::FreezeOrders`], where
/// the host has no cgroup to freeze.
pub const FREEZE_SIGNAL: i32 = 10;

/// The folder with the instructions and the configuration of agents, in the sandbox of a session.
pub const APP_FOLDER: &str = "/app";

/// The first entities of a repository's memory, in [`APP_FOLDER`].
pub const MEMORY_SEED: &str = "/app/memory-seed.json";

/// The folder of [`MEMORY_FILE`].
pub const MEMORY_FOLDER: &str = "~/.mcp-memory";

/// A copy of the repository's memory in the home of the agent's user, in the format of the stock
/// memory server.
pub const MEMORY_FILE: &str = "~/.mcp-memory/memory.jsonl";

/// The folder of [`NetworkSettings`], in sandboxes that have some.
pub const SETTINGS_FOLDER: &str = "/run/harvest";

/// Maximum size of [`NetworkSettings`]: a launch is one packet of 192 KiB.
pub const MAX_SETTINGS_BYTES: usize = 96 * 1024;

/// What programs inside need to reach package sources through the door: certificates to trust and
/// the addresses of mirrors. Never a secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSettings {
    /// Certificates (PEM) to trust besides those of the image.
    pub certificates: String,
    /// Variables of every command, unless the image or the sandbox's creator sets them.
    pub env: BTreeMap<String, String>,
    /// Files below [`SETTINGS_FOLDER`], by name.
    pub files: BTreeMap<String, String>,
}

impl NetworkSettings {
    /// Whether there is nothing to set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The size of all texts.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let pairs = self.env.iter().chain(&self.files);
        self.certificates.len() + pairs.map(|(name, text)| name.len() + text.len()).sum::<usize>()
    }
}

/// The first message of a preforked supervisor, before its sandbox is known: it prepares everything
/// that all sandboxes have in common and waits for its launch. Once it starts no more processes on
/// its own, it shuts its end down for writing; until then the root of its mounts must not change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlyLaunch {
    /// What the attached descriptors are, in their order.
    pub early_descriptors: Vec<Descriptor>,
}

/// The identity and configuration of a supervisor's sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The sandbox whose pid 1 this is.
    pub sandbox: SandboxId,
    /// What the attached descriptors are, in their order.
    pub descriptors: Vec<Descriptor>,
    /// Environment variables of every command, from the image.
    pub env: BTreeMap<String, String>,
    /// The default user of commands, from the image.
    pub user: String,
    /// The default working directory of commands, from the image.
    pub workdir: String,
    /// No gateway will ever serve this sandbox: name lookups are refused at once instead of
    /// waiting.
    pub sealed: bool,
    /// Maximum size of any file, for every process.
    pub file_bytes: Option<u64>,
    /// The CPUs that commands run on by default; all if empty.
    #[serde(default)]
    pub cpus: Vec<u32>,
    /// Certificates and package sources.
    #[serde(default)]
    pub settings: NetworkSettings,
}

/// The role of an inherited descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Descriptor {
    /// A listening Unix stream socket: the bridge.
    Bridge,
    /// A folder (detached, so that it has no parent) that holds [`DOOR_SOCKET`] while a gateway
    /// serves this sandbox. Absent, like the next three, where the host's network is used.
    Door,
    /// A UDP socket bound to port 53 of [`DNS_ADDRESS`].
    DnsUdp,
    /// A listening TCP socket at the same address.
    DnsTcp,
    /// The listening TCP socket to which the kernel redirects every connection to a synthetic
    /// address; `SO_ORIGINAL_DST` returns the original destination.
    Redirect,
    /// `cgroup.procs` of the commands' cgroup; a process that writes `0` joins. One per hierarchy
    /// on v1.
    JoinCommands,
    /// `cgroup.procs` of the agent's cgroup, to join.
    JoinAgent,
    /// `cgroup.procs` of the agent's cgroup, to read: empty means that every process of the agent
    /// is dead.
    AgentProcs,
    /// `cgroup.kill` of the agent's cgroup (v2 only).
    AgentKill,
    /// `freezer.state` of the agent's cgroup (v1 only).
    AgentFreezer,
    /// A file for orders, in place of a cgroup that could be frozen or killed. Its first eight
    /// bytes, in native byte order, are written by the engine: a number that rises with each order,
    /// whose last two bits say what happens to every process but pid 1: 0 thaw, 1 freeze, 2 kill.
    /// Pid 1 writes the last order it has carried out into the next eight.
    FreezeOrders,
    /// A file with a line `oom_kill N`: how many processes the memory limit has killed
    /// (`memory.events` on v2, `memory.oom_control` on v1).
    OomCount,
    /// The sandbox's `/proc/meminfo`, to write. Absent where memory is not limited, or
    /// only by the host's size.
    Meminfo,
    /// How much memory the sandbox uses (`memory.current` on v2, `memory.usage_in_bytes` on v1).
    MemoryUsed,
    /// `memory.stat` of the sandbox.
    MemoryStat,
    /// The sandbox's `/dev/null`, in an early launch: without a root there is none to open.
    DevNull,
    /// The log, after an early launch; without one, standard error is the log.
    Log,
    /// The folder [`APP_FOLDER`], to write: inside it is mounted read-only. Absent in sandboxes
    /// without a session.
    App,
    /// The folder [`SETTINGS_FOLDER`], to write: inside it is mounted read-only. Absent without
    /// [`NetworkSettings`].
    Settings,
}
