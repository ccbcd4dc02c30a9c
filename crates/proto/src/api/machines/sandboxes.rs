//! Sandboxes of one's own: made, looked at, run in, kept, multiplied.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{SandboxId, SnapshotId, Timestamp};

/// `POST /v1/sandboxes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSandbox {
    /// The image it starts from; `base` when neither this nor `from` is given.
    #[serde(default)]
    pub image: Option<String>,
    /// The snapshot it starts from, instead of an image.
    #[serde(default)]
    pub from: Option<SnapshotId>,
    /// What it may use; the host's defaults for what is absent.
    #[serde(default)]
    pub limits: SandboxLimits,
    /// What it can reach; nothing when absent.
    #[serde(default)]
    pub network: SandboxNetwork,
    /// Volumes it has.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Whether it has `/mnt/state`, where one run finds what another has left; true when absent.
    #[serde(default)]
    pub state: Option<bool>,
    /// Variables for every command in it, on top of the image's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// A sandbox that has just been made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedSandbox {
    /// Its id.
    pub sandbox_id: SandboxId,
    /// What it is doing.
    pub status: SandboxStatus,
    /// What it has to do without, in words.
    pub warnings: Vec<String>,
}

/// Whether a sandbox runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SandboxStatus {
    /// It runs.
    Running,
    /// Nothing runs in it; its disk is there.
    Dead,
}

/// What a sandbox's commands may use together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxLimits {
    /// Memory, swap included.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1048576, maximum = 1125899906842624_i64))]
    pub memory_bytes: Option<u64>,
    /// CPU time per second; 1000 is one core.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 10, maximum = 4096000))]
    pub cpu_millis_per_second: Option<u32>,
    /// Processes and threads.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 4194304))]
    pub pids: Option<u32>,
    /// What it may write to its own disk, volumes apart.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 4096, maximum = 1125899906842624_i64))]
    pub writable_bytes: Option<u64>,
    /// It is ended after this, and its disk kept; never when absent.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 315360000))]
    pub lifetime_secs: Option<u64>,
}

/// What a sandbox can reach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SandboxNetwork {
    /// Nothing: names are refused at once.
    #[default]
    None,
    /// The session's gateway; only sessions ask for it.
    Gateway,
    /// UNSAFE: all that the host reaches, its loopback included.
    Host,
}

/// A volume at a path inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VolumeMount {
    /// Which.
    pub name: String,
    /// An absolute path inside.
    pub inside: String,
    /// Nobody inside can write to it.
    #[serde(default)]
    pub read_only: bool,
}

/// A sandbox as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// Whether it runs.
    pub state: SandboxStatus,
    /// Why it does not.
    pub reason: Option<String>,
    /// Its first process, as the host sees it.
    pub pid: Option<u32>,
    /// The image it grew from, as far as that is known.
    pub image: Option<String>,
    /// `you`: it stays until it is deleted; `session`: it is a session's; `process N`: it goes with that
    /// process of the host.
    pub owner: String,
    /// The user who asked a server for it; absent for one that was made without a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// What it can reach.
    pub network: SandboxNetwork,
    /// What it may use.
    pub limits: SandboxLimits,
    /// Volumes it has.
    pub volumes: Vec<VolumeMount>,
    /// Variables on top of the image's.
    pub env: BTreeMap<String, String>,
    /// Who commands run as unless they say otherwise.
    pub user: String,
    /// Where commands run unless they say otherwise.
    pub workdir: String,
    /// What its disk stands on, bottom first.
    pub layers: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Every sandbox of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxList {
    /// Newest first.
    pub items: Vec<Sandbox>,
    /// Those whose records cannot be read; they can only be deleted, by force.
    pub torn: Vec<TornSandbox>,
}

/// A sandbox of which nothing is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TornSandbox {
    /// Its id.
    pub id: SandboxId,
    /// Why.
    pub error: String,
}

/// `POST /v1/sandboxes/{sandbox}/exec`. The answer is JSON lines of [`ExecLine`](crate::api::ExecLine).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RunCommand {
    /// Program and arguments; with `code`, its arguments.
    #[serde(default)]
    pub argv: Vec<String>,
    /// Run this text instead of a program; `lang` says what it is written in.
    #[serde(default)]
    pub code: Option<String>,
    /// What `code` is written in.
    #[serde(default)]
    pub lang: Option<Language>,
    /// Variables on top of the sandbox's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Working folder; the image's when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// `harvest`, `root` or a number; the image's when absent.
    #[serde(default)]
    pub user: Option<String>,
    /// Killed with all it started after this many milliseconds; 30 minutes when absent, never when 0.
    #[serde(default)]
    pub timeout_millis: Option<u64>,
    /// What the command reads, base64; nothing when absent.
    #[serde(default)]
    pub stdin: Option<String>,
}

/// What code is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Language {
    /// `python3`.
    Python,
    /// `node`.
    Node,
    /// `bash`.
    Bash,
}

/// `POST /v1/exec`: a command in a fresh sandbox that is gone afterwards. The answer is JSON lines of
/// [`ExecLine`](crate::api::ExecLine), the first of which is `started`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecOnce {
    /// The image the sandbox starts from; `base` when neither this nor `from` is given.
    #[serde(default)]
    pub image: Option<String>,
    /// The snapshot it starts from, instead of an image.
    #[serde(default)]
    pub from: Option<SnapshotId>,
    /// What it may use; the host's defaults for what is absent.
    #[serde(default)]
    pub limits: SandboxLimits,
    /// What it can reach; nothing when absent.
    #[serde(default)]
    pub network: SandboxNetwork,
    /// Volumes it has.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Whether it has `/mnt/state`, where one run finds what another has left; true when absent.
    #[serde(default)]
    pub state: Option<bool>,
    /// Program and arguments; with `code`, its arguments.
    #[serde(default)]
    pub argv: Vec<String>,
    /// Run this text instead of a program; `lang` says what it is written in.
    #[serde(default)]
    pub code: Option<String>,
    /// What `code` is written in.
    #[serde(default)]
    pub lang: Option<Language>,
    /// Variables on top of the image's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Working folder; the image's when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// `harvest`, `root` or a number; the image's when absent.
    #[serde(default)]
    pub user: Option<String>,
    /// Killed with all it started after this many milliseconds; 30 minutes when absent, never when 0.
    #[serde(default)]
    pub timeout_millis: Option<u64>,
    /// What the command reads, base64; nothing when absent.
    #[serde(default)]
    pub stdin: Option<String>,
}

impl ExecOnce {
    /// The sandbox, and what is run in it.
    #[must_use]
    pub fn parts(self) -> (CreateSandbox, RunCommand) {
        let Self { image, from, limits, network, volumes, state, .. } = self;
        let Self { argv, code, lang, env, cwd, user, timeout_millis, stdin, .. } = self;
        let sandbox =
            CreateSandbox { image, from, limits, network, volumes, state, env: BTreeMap::new() };
        (sandbox, RunCommand { argv, code, lang, env, cwd, user, timeout_millis, stdin })
    }
}

/// The disk of a sandbox that goes on, kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxSnapshot {
    /// The snapshot.
    pub id: SnapshotId,
    /// Whose disk it is.
    pub sandbox: SandboxId,
    /// How long the sandbox stood still.
    pub frozen_millis: u64,
    /// What was copied.
    pub bytes: u64,
}

/// `POST /v1/sandboxes/{sandbox}/fork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkSandbox {
    /// How many, 1 to 100; one when absent.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 100))]
    pub count: Option<u16>,
}

/// What a fork came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkedSandbox {
    /// The sandbox that was forked.
    pub source: SandboxId,
    /// Those that began as it was.
    pub forks: Vec<SandboxId>,
    /// Why there are fewer than were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// `POST /v1/sandboxes/{sandbox}/restore`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoreSandbox {
    /// What to go back to.
    pub snapshot: SnapshotId,
}

/// A sandbox that was put back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoredSandbox {
    /// The sandbox; its id stays.
    pub id: SandboxId,
    /// What it began as again.
    pub snapshot: SnapshotId,
    /// What was on its disk before.
    pub kept: SnapshotId,
}
