//! What is written down of a sandbox: `record.json` says what it was asked to be, `state.json` how far it has
//! come, `stopped.json` when its disk was too full.

use std::{collections::BTreeMap, fs, path::Path};

use harvest_proto::{SandboxId, SnapshotId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    error::{AtPath, EngineError},
    home::{Home, Survives, boot_id, read_record, start_ticks, write_record},
    spec::{Bind, ImageConfig, LayerId, Limits, Network, Owner, VolumeMount},
};

// What a sandbox was asked to be.
pub(super) const RECORD: &str = "record.json";

/// What a sandbox was asked to be, with its image or snapshot looked up.
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
    #[serde(default)]
    pub(crate) volumes: Vec<VolumeMount>,
    /// No file may become larger.
    #[serde(default)]
    pub(crate) file_bytes: Option<u64>,
    /// On top of the config's.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) created_at: Timestamp,
    /// [`Network::Nothing`]. Not in `network`: a zygote of an earlier build must be able to read this.
    #[serde(default)]
    pub(crate) sealed: bool,
    /// [`Owner::Sessions`]. Not in `owner`, for the same reason.
    #[serde(default)]
    pub(crate) of_sessions: bool,
    /// When it was started again, the last time.
    #[serde(default)]
    pub(crate) again_at: Option<Timestamp>,
    /// The snapshot its disk began as.
    #[serde(default)]
    pub(crate) snapshot: Option<SnapshotId>,
    /// The user of a server that asked for it.
    #[serde(default)]
    pub(crate) made_by: Option<String>,
}

/// How far a sandbox has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum State {
    /// Pid 1 exists.
    Running {
        /// The boot of the host in which it does.
        boot: String,
        pid: u32,
        /// Tells the process from a later one with its pid.
        started: u64,
        /// The host's id for root inside.
        first_id: u32,
        /// When the owner, where it is a process, was started.
        owner_started: Option<u64>,
    },
    /// All of it is dead.
    Ended { reason: String, at: Timestamp },
}

/// What ran in a sandbox was stopped because its disk had become too full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// What its disk weighed: content, and 4 KiB for each name.
    pub weight_bytes: u64,
    /// What it may weigh.
    pub limit_bytes: u64,
    /// When.
    pub at: Timestamp,
}

impl Stopped {
    pub(crate) fn write(&self, home: &Home, id: &SandboxId) -> Result<(), EngineError> {
        write_record(&home.sandbox(id).join("stopped.json"), self, Survives::Crash)
    }
}

impl Record {
    /// For a process that is to become some sandbox: as far as it gets by itself, all are alike.
    pub(crate) fn of_a_seed() -> Self {
        Self {
            id: SandboxId::random(),
            layers: Vec::new(),
            config: ImageConfig::default(),
            limits: Limits::default(),
            network: Network::Door,
            owner: Owner::Kept,
            binds: Vec::new(),
            volumes: Vec::new(),
            file_bytes: None,
            env: BTreeMap::new(),
            created_at: Timestamp::from_millis(0),
            sealed: false,
            of_sessions: false,
            again_at: None,
            snapshot: None,
            made_by: None,
        }
    }

    /// What its lifetime counts from.
    pub(crate) fn lives_since(&self) -> Timestamp {
        self.again_at.unwrap_or(self.created_at)
    }

    /// What it can reach.
    pub(crate) fn network(&self) -> Network {
        if self.sealed { Network::Nothing } else { self.network }
    }

    /// Who it lives for.
    pub(crate) fn owner(&self) -> Owner {
        if self.of_sessions { Owner::Sessions } else { self.owner }
    }

    pub(crate) fn read(home: &Home, id: &SandboxId) -> Result<Option<Self>, EngineError> {
        read_record(&home.sandbox(id).join(RECORD))
    }
}

impl State {
    pub(crate) fn read(home: &Home, id: &SandboxId) -> Result<Option<Self>, EngineError> {
        read_record(&home.sandbox(id).join("state.json"))
    }

    pub(crate) fn write(&self, home: &Home, id: &SandboxId) -> Result<(), EngineError> {
        // No sandbox outlives a power cut, so its state need not either.
        write_record(&home.sandbox(id).join("state.json"), self, Survives::Crash)
    }

    pub(crate) fn ended(reason: impl Into<String>) -> Self {
        Self::Ended { reason: reason.into(), at: std::time::SystemTime::now().into() }
    }

    /// Pid 1's pid, while it lives.
    pub(crate) fn living(&self) -> Option<u32> {
        match self {
            Self::Running { boot, pid, started, .. } => {
                (boot == boot_id() && start_ticks(*pid) == Some(*started)).then_some(*pid)
            }
            Self::Ended { .. } => None,
        }
    }
}

/// Every sandbox with a folder.
pub(crate) fn all(home: &Home) -> Result<Vec<SandboxId>, EngineError> {
    parts_in(&home.sandboxes())
}

/// The sandboxes that names in a folder are of.
pub(crate) fn parts_in(folder: &Path) -> Result<Vec<SandboxId>, EngineError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_an_older_engine_can_be_read() {
        let mut record = serde_json::to_value(Record::of_a_seed()).unwrap();
        for field in ["volumes", "file_bytes"] {
            record.as_object_mut().unwrap().remove(field).unwrap();
        }
        let limits = record["limits"].as_object_mut().unwrap();
        for field in ["writable_bytes", "lifetime_secs"] {
            limits.remove(field).unwrap();
        }
        let record: Record = serde_json::from_value(record).unwrap();
        assert_eq!((record.limits.writable_bytes, record.limits.lifetime_secs), (None, None));
    }
}
