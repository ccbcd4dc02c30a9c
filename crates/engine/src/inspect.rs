//! What there is to know of a sandbox, and starting a dead one again with the disk it left.

use std::os::fd::{AsFd, BorrowedFd};

use harvest_proto::{SandboxId, Timestamp};
use serde::Serialize;

use crate::{
    Engine,
    error::EngineError,
    home::{Survives, write_record},
    room::What,
    sandbox::{Record, Running, SandboxState, host_resolv_conf},
    spec::{Origin, Owner, Spec},
    zygote::{
        client,
        protocol::{Answer, Request},
    },
};

/// A sandbox, as it was asked for and as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Inspected {
    /// What it was asked to be, its image or snapshot looked up: another one can be started from this.
    pub spec: Spec,
    /// When it was made.
    pub created_at: Timestamp,
    /// What became of it.
    pub state: SandboxState,
}

impl Engine {
    /// What there is to know of a sandbox; `None` when nothing is left of it.
    ///
    /// # Errors
    /// When its records cannot be read.
    pub fn inspect(&self, id: &SandboxId) -> Result<Option<Inspected>, EngineError> {
        self.store.wake()?;
        let Some(record) = Record::read(&self.home, id)? else { return Ok(None) };
        let state = self.find(id)?;
        if state == SandboxState::Gone {
            return Ok(None);
        }
        let (network, owner) = (record.network(), record.owner());
        let spec = Spec {
            id: record.id,
            from: Origin::Layers { layers: record.layers, config: record.config },
            limits: record.limits,
            network,
            owner,
            binds: record.binds,
            volumes: record.volumes,
            env: record.env,
            made_by: record.made_by,
        };
        Ok(Some(Inspected { spec, created_at: record.created_at, state }))
    }

    /// Every sandbox of this owner with a record, running or dead. One whose record cannot be read is
    /// nobody's: it must not keep everybody else from theirs.
    ///
    /// # Errors
    /// When the folder of sandboxes cannot be read.
    pub fn list_of(&self, owner: Owner) -> Result<Vec<SandboxId>, EngineError> {
        let mut ids = Vec::new();
        for id in self.list()? {
            let record = Record::read(&self.home, &id).ok().flatten();
            if record.is_some_and(|record| record.owner() == owner) {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// Every sandbox that runs and stays until somebody ends it, sessions' apart, with who made it. One whose
    /// record cannot be read is passed by, as in [`Engine::list_of`].
    ///
    /// # Errors
    /// When the folder of sandboxes cannot be read.
    pub fn running_kept(&self) -> Result<Vec<(SandboxId, Option<String>)>, EngineError> {
        let mut found = Vec::new();
        for id in self.list()? {
            let record = Record::read(&self.home, &id).ok().flatten();
            let Some(record) = record.filter(|record| record.owner() == Owner::Kept) else {
                continue;
            };
            if matches!(self.find(&id), Ok(SandboxState::Running(_))) {
                found.push((id, record.made_by));
            }
        }
        Ok(found)
    }

    /// Starts a dead sandbox again, under its id and with the disk it left; its lifetime begins anew. What
    /// ran in it does not run again. When it cannot be started its disk stays.
    ///
    /// # Errors
    /// When nobody knows it, it runs, its disk is being kept as a snapshot, or the host says no.
    pub fn start_again(&self, id: &SandboxId) -> Result<Running, EngineError> {
        self.store.wake()?;
        self.has_room(What::Sandbox)?;
        let unknown = || EngineError::NotRunning { sandbox: id.clone() };
        let mut record = Record::read(&self.home, id)?.ok_or_else(unknown)?;
        let _turn = self.disk.lock_sandbox(id)?;
        let _hold = self.disk.hold()?;
        if matches!(self.find(id)?, SandboxState::Running(_)) {
            return Err(EngineError::Exists { sandbox: id.clone() });
        }
        if self.disk.ending(id)?.is_some() {
            let reason = format!("the disk of {id} is being kept as a snapshot");
            return Err(EngineError::Invalid { reason });
        }
        let layers: Vec<_> = record
            .layers
            .iter()
            .map(|layer| self.disk.layer_path(layer))
            .collect::<Result<_, _>>()?;
        // Its lifetime begins anew, also for a zygote that adopts it later.
        record.again_at = Some(std::time::SystemTime::now().into());
        write_record(&self.home.sandbox(id).join("record.json"), &record, Survives::PowerCut)?;
        let files = self.handed_over(&record, &layers)?;
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let resolv_conf = host_resolv_conf(record.network);
        let build = self.build();
        let request =
            Request::Start { record: Box::new(record), layers, resolv_conf, build, again: true };
        match client::ask(&self.config, &request, &files)? {
            Answer::Started { pid } => Ok(self.running(id, pid)),
            Answer::Failed { reason } | Answer::Ended { reason } => {
                Err(EngineError::Refused { doing: "start", sandbox: id.clone(), reason })
            }
            other => Err(EngineError::Refused {
                doing: "start",
                sandbox: id.clone(),
                reason: format!("unexpected answer {other:?}"),
            }),
        }
    }
}
