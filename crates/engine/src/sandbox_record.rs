//! The state of a sandbox and its records: `record.json` holds what was requested, `state.json` its
//! progress, `stopped.json` the last time it exceeded its disk limit.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use harvest_proto::{SandboxId, SnapshotId, Timestamp, api::SandboxDoor, launch::NetworkSettings};
use serde::{Deserialize, Serialize};

use crate::{
    error::{AtPath, EngineError},
    home::Home,
    process::{boot_id, start_ticks},
    records::{read_record, write_record_unsynced},
    spec::{Bind, ImageConfig, LayerId, Limits, Network, Owner, VolumeMount},
};

pub(crate) const RECORD: &str = "record.json";

/// A requested sandbox with its image or snapshot resolved to layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: SandboxId,
    /// Bottom first.
    pub(crate) layers: Vec<LayerId>,
    pub(crate) config: ImageConfig,
    pub(crate) limits: Limits,
    pub(crate) network: Network,
    pub(crate) owner: Owner,
    pub(crate) binds: Vec<Bind>,
    pub(crate) volumes: Vec<VolumeMount>,
    /// Maximum size of any file.
    pub(crate) file_bytes: Option<u64>,
    /// Added to the image's environment.
    pub(crate) env: BTreeMap<String, String>,
    /// What a standalone sandbox reaches through its door.
    #[serde(default)]
    pub(crate) door: Option<SandboxDoor>,
    /// Certificates and package sources.
    #[serde(default)]
    pub(crate) settings: NetworkSettings,
    pub(crate) created_at: Timestamp,
    /// Time of the last restart.
    pub(crate) restarted_at: Option<Timestamp>,
    /// The snapshot its disk started from.
    pub(crate) snapshot: Option<SnapshotId>,
    /// Address of the server's user who created it.
    pub(crate) made_by: Option<String>,
    /// The kernel boot of its last start. What it wrote may be lost once that boot has ended.
    pub(crate) boot: String,
}

/// The recorded progress of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum RecordedState {
    /// Pid 1 exists.
    Running {
        /// Boot id of the host.
        boot: String,
        pid: u32,
        /// Start time; distinguishes the process from a later one with its pid.
        started: u64,
        /// Host id of root inside.
        first_id: u32,
        /// Start time of the owner, if it is a process.
        owner_started: Option<u64>,
        /// Name of its cgroups: that of the standby it was, because v2 cannot rename a cgroup.
        cgroup: String,
    },
    /// All its processes are dead.
    Ended {
        reason: String,
        at: Timestamp,
        /// The CPU time it used.
        #[serde(default)]
        cpu_micros: Option<u64>,
    },
}

/// A sandbox's processes were killed because it exceeded its disk limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimitStop {
    /// Disk usage: content, and 4 KiB for each name.
    pub used_bytes: u64,
    /// The disk limit.
    pub limit_bytes: u64,
    /// Time of the kill.
    pub at: Timestamp,
}

/// A running sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Running {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Socket of its supervisor.
    pub bridge: PathBuf,
    /// Path at which the gateway binds its socket for this sandbox.
    pub door: PathBuf,
    /// Pid 1's pid on the host.
    pub pid: u32,
}

/// The current state of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum SandboxState {
    /// The sandbox is running.
    Running(Running),
    /// The sandbox is dead; its disk still exists.
    Dead {
        /// Why it died, as far as known.
        reason: String,
    },
    /// The sandbox was removed or never existed.
    Gone,
}

impl DiskLimitStop {
    pub(crate) fn write(&self, home: &Home, id: &SandboxId) -> Result<(), EngineError> {
        write_record_unsynced(&home.sandbox(id).join("stopped.json"), self)
    }
}

impl Record {
    /// For a standby, which runs only steps that are equal for all sandboxes.
    pub(crate) fn of_a_standby() -> Self {
        Self {
            id: SandboxId::random(),
            layers: Vec::new(),
            config: ImageConfig::default(),
            limits: Limits::default(),
            network: Network::Door,
            owner: Owner::Standalone,
            binds: Vec::new(),
            volumes: Vec::new(),
            file_bytes: None,
            env: BTreeMap::new(),
            door: None,
            settings: NetworkSettings::default(),
            created_at: Timestamp::from_millis(0),
            restarted_at: None,
            snapshot: None,
            made_by: None,
            boot: boot_id().to_owned(),
        }
    }

    /// Start of its lifetime.
    pub(crate) fn lifetime_start(&self) -> Timestamp {
        self.restarted_at.unwrap_or(self.created_at)
    }

    pub(crate) fn read(home: &Home, id: &SandboxId) -> Result<Option<Self>, EngineError> {
        read_record(&home.sandbox(id).join(RECORD))
    }
}

impl RecordedState {
    pub(crate) fn read(home: &Home, id: &SandboxId) -> Result<Option<Self>, EngineError> {
        read_record(&home.sandbox(id).join("state.json"))
    }

    pub(crate) fn write(&self, home: &Home, id: &SandboxId) -> Result<(), EngineError> {
        // A sandbox does not survive a power cut, so its state need not either.
        write_record_unsynced(&home.sandbox(id).join("state.json"), self)
    }

    pub(crate) fn ended(reason: impl Into<String>) -> Self {
        let at = std::time::SystemTime::now().into();
        Self::Ended { reason: reason.into(), at, cpu_micros: None }
    }

    /// Pid 1's pid, while it lives.
    pub(crate) fn live_pid(&self) -> Option<u32> {
        match self {
            Self::Running { boot, pid, started, .. } => {
                (boot == boot_id() && start_ticks(*pid) == Some(*started)).then_some(*pid)
            }
            Self::Ended { .. } => None,
        }
    }
}

pub(crate) fn list_ids(home: &Home) -> Result<Vec<SandboxId>, EngineError> {
    ids_in(&home.sandboxes())
}

/// The sandboxes whose id parts are file names in this folder.
pub(crate) fn ids_in(folder: &Path) -> Result<Vec<SandboxId>, EngineError> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(folder).at("list", folder)? {
        let name = entry.at("list", folder)?.file_name();
        let id =
            name.to_str().and_then(|part| format!("{}_{part}", SandboxId::PREFIX).parse().ok());
        ids.extend(id);
    }
    ids.sort();
    Ok(ids)
}
