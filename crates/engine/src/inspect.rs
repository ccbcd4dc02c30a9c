//! Inspects sandboxes, and restarts dead ones with the disk they left.

use harvest_proto::{SandboxId, Timestamp};
use serde::Serialize;

use crate::{
    Engine,
    cgroup::{ComputeUsage, Hierarchy},
    disk_thresholds::DiskOperation,
    error::EngineError,
    process::boot_id,
    records::write_record,
    sandbox_record::{Record, RecordedState, Running, SandboxState},
    spec::{Origin, Owner, Spec},
    zygote::{
        client,
        protocol::{Answer, Request, StandbyCounts},
    },
};

/// A sandbox's spec and current state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Inspected {
    /// The requested spec with its image or snapshot resolved to layers; another sandbox can be
    /// started from it.
    pub spec: Spec,
    /// Creation time.
    pub created_at: Timestamp,
    /// Current state.
    pub state: SandboxState,
}

impl Engine {
    /// Describes a sandbox; `None` when it is unknown or removed.
    ///
    /// # Errors
    /// When its records cannot be read.
    pub fn inspect(&self, id: &SandboxId) -> Result<Option<Inspected>, EngineError> {
        self.store.ensure_mounted()?;
        let Some(record) = Record::read(&self.disk.home, id)? else { return Ok(None) };
        let state = self.find(id)?;
        if state == SandboxState::Gone {
            return Ok(None);
        }
        let spec = Spec {
            id: record.id,
            from: Origin::Layers { layers: record.layers, config: record.config },
            limits: record.limits,
            network: record.network,
            owner: record.owner,
            binds: record.binds,
            door: record.door,
            settings: record.settings,
            volumes: record.volumes,
            env: record.env,
            made_by: record.made_by,
        };
        Ok(Some(Inspected { spec, created_at: record.created_at, state }))
    }

    /// What a sandbox uses: its CPU time since its start, also after its end, and its present
    /// memory. `None` where the host does not count it, or when there is no such sandbox.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn usage(&self, id: &SandboxId) -> Result<Option<ComputeUsage>, EngineError> {
        self.store.ensure_mounted()?;
        Ok(match RecordedState::read(&self.disk.home, id)? {
            Some(RecordedState::Ended { cpu_micros, .. }) => {
                cpu_micros.map(|cpu_micros| ComputeUsage { cpu_micros, memory_bytes: 0 })
            }
            Some(RecordedState::Running { cgroup, .. }) => {
                let hierarchy = Hierarchy::detect().unwrap_or(Hierarchy::None);
                hierarchy.usage(&self.disk.home.cgroup_name(), &cgroup)
            }
            None => None,
        })
    }

    /// The standby counts of this home's zygote; `None` when no zygote runs. Starts no zygote and
    /// keeps none alive.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn standby_counts(&self) -> Result<Option<StandbyCounts>, EngineError> {
        Ok(match client::ask_if_running(&self.disk.home, &Request::StandbyCounts)? {
            Some(Answer::StandbyCounts(counts)) => Some(counts),
            _ => None,
        })
    }

    /// Every sandbox with its owner and creator. One with an unreadable record is left out: what
    /// cannot be attributed must not be removed.
    ///
    /// # Errors
    /// When the folder of sandboxes cannot be read.
    pub fn owners(&self) -> Result<Vec<(SandboxId, Owner, Option<String>)>, EngineError> {
        let record = |id| Record::read(&self.disk.home, &id).ok().flatten();
        let records = self.list()?.into_iter().filter_map(record);
        Ok(records.map(|record| (record.id, record.owner, record.made_by)).collect())
    }

    /// Restarts a dead sandbox under its id and with the disk it left; its lifetime begins anew.
    /// Its earlier processes are not restored. When the start fails, the disk stays.
    ///
    /// # Errors
    /// When it is unknown or running, its disk is being saved as a snapshot, or the host refuses.
    pub fn restart(&self, id: &SandboxId) -> Result<Running, EngineError> {
        self.store.ensure_mounted()?;
        self.check_free_space(DiskOperation::Sandbox)?;
        let unknown = || EngineError::NotRunning { sandbox: id.clone() };
        let mut record = Record::read(&self.disk.home, id)?.ok_or_else(unknown)?;
        let _turn = self.disk.lock_sandbox(id)?;
        let _gc_lock = self.disk.lock_against_gc()?;
        if matches!(self.find(id)?, SandboxState::Running(_)) {
            return Err(EngineError::Exists(id.clone()));
        }
        if self.disk.pending_save(id)?.is_some() {
            let reason = format!("the disk of {id} is being saved as a snapshot");
            return Err(EngineError::Invalid(reason));
        }
        let layers: Vec<_> = record
            .layers
            .iter()
            .map(|layer| self.disk.layer_path(layer))
            .collect::<Result<_, _>>()?;
        // Recorded, so that a zygote that adopts it later also counts from now.
        record.restarted_at = Some(std::time::SystemTime::now().into());
        record.boot = boot_id().to_owned();
        write_record(&self.disk.home.sandbox(id).join("record.json"), &record)?;
        let files = self.open_descriptors(&record, &layers)?;
        self.request_start(record, layers, &files, true, &mut || {})
    }
}
