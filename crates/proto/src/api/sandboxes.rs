//! Standalone sandboxes: create, list, snapshot, fork, restore.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{NetworkPolicy, SandboxId, SnapshotId, Timestamp, text::string_conversions};

/// `POST /v1/sandboxes`: creates a standalone sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSandbox {
    /// Image to start from; `base` when neither this nor `from` is given.
    pub image: Option<String>,
    /// Snapshot to start from, instead of an image.
    pub from: Option<SnapshotId>,
    /// Resource limits; the machine's defaults for absent ones.
    #[serde(default)]
    pub limits: SandboxLimits,
    /// Network access; none when absent.
    #[serde(default)]
    pub network: SandboxNetwork,
    /// What it reaches through the gateway; the policy `trusted` when absent. Only with the network
    /// `gateway`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub door: Option<SandboxDoor>,
    /// Volumes to mount.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Mount the shared folder `/mnt/state`, which keeps its files between sandboxes; true when
    /// absent.
    pub state: Option<bool>,
    /// Environment variables for every command, in addition to the image's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// A new sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedSandbox {
    /// Id of the sandbox.
    pub sandbox_id: SandboxId,
    /// Whether the sandbox runs.
    pub status: SandboxStatus,
    /// Features this machine cannot give the sandbox.
    pub warnings: Vec<String>,
}

/// Status of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SandboxStatus {
    /// The sandbox runs.
    Running,
    /// The sandbox has stopped; its disk is left.
    Dead,
}

/// What a sandbox belongs to, which decides how long it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SandboxOwner {
    /// Stays until it is deleted.
    Standalone,
    /// Belongs to a session, a build or a check.
    Session,
    /// Removed when this process ends.
    Process(u32),
}

impl fmt::Display for SandboxOwner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standalone => out.write_str("you"),
            Self::Session => out.write_str("session"),
            Self::Process(pid) => write!(out, "process {pid}"),
        }
    }
}

impl FromStr for SandboxOwner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "you" => Ok(Self::Standalone),
            "session" => Ok(Self::Session),
            other => other
                .strip_prefix("process ")
                .and_then(|pid| pid.parse().ok())
                .map(Self::Process)
                .ok_or_else(|| format!("`{other}` owns no sandbox")),
        }
    }
}

string_conversions!(SandboxOwner, String);

/// Resource limits of a sandbox, for all its commands together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxLimits {
    /// Memory including swap.
    #[cfg_attr(feature = "openapi", schema(minimum = 1048576, maximum = 1125899906842624_i64))]
    pub memory_bytes: Option<u64>,
    /// CPU time in milliseconds per second; 1000 is one core.
    #[cfg_attr(feature = "openapi", schema(minimum = 10, maximum = 4096000))]
    pub cpu_millis_per_second: Option<u32>,
    /// Number of processes and threads.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 4194304))]
    pub pids: Option<u32>,
    /// Bytes the sandbox may write to its own disk, volumes not included.
    #[cfg_attr(feature = "openapi", schema(minimum = 4096, maximum = 1125899906842624_i64))]
    pub writable_bytes: Option<u64>,
    /// The sandbox is stopped after this time and its disk kept; never when absent.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 315360000))]
    pub lifetime_secs: Option<u64>,
}

/// Network access of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SandboxNetwork {
    /// No network: DNS look-ups fail at once.
    #[default]
    None,
    /// Through the gateway, to the names of a policy.
    Gateway,
    /// UNSAFE: the machine's own network, including its loopback.
    Host,
}

/// What a standalone sandbox reaches through the gateway. It has no model, git remotes or tools.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxDoor {
    /// Base of its policy.
    pub policy: NetworkPolicy,
    /// Names besides those of the base, each with a port or not: `example.org`,
    /// `*.example.org:8443`.
    #[serde(default)]
    pub allow: Vec<String>,
}

/// A volume mounted in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// Mount point: an absolute path in the sandbox.
    pub inside: String,
    /// Mount it read-only.
    #[serde(default)]
    pub read_only: bool,
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Whether the sandbox runs.
    pub state: SandboxStatus,
    /// Why the sandbox does not run.
    pub reason: Option<String>,
    /// Pid of the sandbox's first process on the machine.
    pub pid: Option<u32>,
    /// Image the sandbox was started from, if known.
    pub image: Option<String>,
    /// `you`: kept until it is deleted. `session`: belongs to a session. `process N`: removed when
    /// that process of the machine ends.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub owner: SandboxOwner,
    /// User who created it; absent when it was created without a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// Network access.
    pub network: SandboxNetwork,
    /// What a standalone sandbox reaches through the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub door: Option<SandboxDoor>,
    /// Resource limits.
    pub limits: SandboxLimits,
    /// Mounted volumes.
    pub volumes: Vec<VolumeMount>,
    /// Environment variables in addition to the image's.
    pub env: BTreeMap<String, String>,
    /// Default user of commands.
    pub user: String,
    /// Default working folder of commands.
    pub workdir: String,
    /// Layers of its disk, bottom first.
    pub layers: Vec<String>,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// All sandboxes of this home.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxList {
    /// The sandboxes, newest first.
    pub items: Vec<Sandbox>,
    /// Sandboxes whose records cannot be read; they can only be deleted with `force`.
    pub damaged: Vec<DamagedSandbox>,
}

/// A sandbox whose record cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DamagedSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Why the record cannot be read.
    pub error: String,
}

/// A new snapshot of a running sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxSnapshot {
    /// Id of the snapshot.
    pub id: SnapshotId,
    /// The sandbox it was taken of.
    pub sandbox: SandboxId,
    /// Time for which the sandbox was frozen.
    pub frozen_millis: u64,
    /// Bytes copied.
    pub bytes: u64,
}

/// `POST /v1/sandboxes/{sandbox}/fork`: starts copies of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkSandbox {
    /// Number of copies, 1 to 100; one when absent.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 100))]
    pub count: Option<u16>,
}

/// Result of a fork.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkedSandbox {
    /// The sandbox that was forked.
    pub source: SandboxId,
    /// The copies.
    pub forks: Vec<SandboxId>,
    /// Why there are fewer copies than requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// `POST /v1/sandboxes/{sandbox}/restore`: resets a sandbox to a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoreSandbox {
    /// Snapshot to restore.
    pub snapshot_id: SnapshotId,
}

/// Result of a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoredSandbox {
    /// Id of the sandbox, unchanged.
    pub id: SandboxId,
    /// The restored snapshot.
    pub snapshot_id: SnapshotId,
    /// A new snapshot of the sandbox's disk as it was before the restore.
    pub kept: SnapshotId,
}
