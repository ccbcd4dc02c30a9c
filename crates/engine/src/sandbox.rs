//! Starts, finds, freezes, kills and removes sandboxes. `record.json` holds the request and changes
//! only on a restart; `state.json` is written by the zygote and holds the sandbox's progress.

use std::{
    fs,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use harvest_proto::{
    SandboxId,
    launch::{DOOR_SOCKET, MAX_SETTINGS_BYTES},
};

use crate::{
    Engine,
    cgroup::Hierarchy,
    disk_thresholds::DiskOperation,
    error::{AtPath, EngineError},
    facts, file_lock,
    plan::{HostFacts, Plan, plan},
    process::boot_id,
    records::{read_record, sync, write_record_unsynced},
    sandbox_record::{
        DiskLimitStop, RECORD, Record, RecordedState, Running, SandboxState, list_ids,
    },
    spec::{Network, Origin, Owner, Spec},
    syscall, trash, volume,
    writable::{self, WritableOrigin},
    zygote::{
        client,
        protocol::{Answer, BuildId, Request},
    },
};

impl Engine {
    /// Starts a sandbox; its bridge accepts connections when this returns.
    ///
    /// # Errors
    /// When its image is missing, its id is taken or the host refuses; nothing is left of it then.
    pub fn start(&self, spec: &Spec) -> Result<Running, EngineError> {
        self.store.ensure_mounted()?;
        self.check_free_space(DiskOperation::Sandbox)?;
        // Until the record exists, nothing else marks these layers as used.
        let _gc_lock = self.disk.lock_against_gc()?;
        let (record, layers, cloned) = self.build_record(spec)?;
        let files = self.open_descriptors(&record, &layers)?;
        self.record_insert(&record, cloned.as_deref())?;
        let mut synced = Ok(());
        let started = self
            .request_start(record, layers, &files, false, &mut || synced = self.record_sync(spec));
        match synced.and(started) {
            Err(refused @ EngineError::Refused { .. }) => {
                self.remove(&spec.id)?;
                Err(refused)
            }
            Err(error) => {
                let _ = self.remove(&spec.id);
                Err(error)
            }
            started => started,
        }
    }

    /// Asks the zygote to start a recorded sandbox, and runs `meanwhile` until it answers.
    pub(crate) fn request_start(
        &self,
        record: Record,
        layers: Vec<PathBuf>,
        files: &[OwnedFd],
        restart: bool,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Running, EngineError> {
        let sandbox = record.id.clone();
        let resolv_conf = host_resolv_conf(record.network);
        // The program that a new zygote would run.
        let build = self.config.zygote.first().and_then(|program| BuildId::of(Path::new(program)));
        let request =
            Request::Start { record: Box::new(record), layers, resolv_conf, build, restart };
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let reason = match client::ask_while(&self.config, &request, &files, meanwhile)? {
            Answer::Started { pid } => return Ok(self.running(&sandbox, pid)),
            Answer::Failed { reason } | Answer::Ended { reason } => reason,
            other => format!("unexpected answer: {other:?}"),
        };
        Err(EngineError::Refused { doing: "start", sandbox, reason })
    }

    /// The steps [`Engine::start`] would run.
    ///
    /// # Errors
    /// When the image is missing or the host lacks cgroups.
    pub fn plan(&self, spec: &Spec) -> Result<Plan, EngineError> {
        self.store.ensure_mounted()?;
        let (record, layers, _) = self.build_record(spec)?;
        let cgroups = Hierarchy::detect().map_err(|error| EngineError::Zygote(error.line()))?;
        let facts = HostFacts {
            cgroups,
            group: self.disk.home.cgroup_name(),
            resolv_conf: host_resolv_conf(record.network),
            redirect: facts::detect_redirect_in_thread(),
            ids: facts::id_allocation(),
            size: facts::host_size(),
        };
        Ok(plan(&record, &layers, &facts))
    }

    /// The current state of a sandbox.
    ///
    /// # Errors
    /// When its records cannot be read.
    pub fn find(&self, id: &SandboxId) -> Result<SandboxState, EngineError> {
        self.store.ensure_mounted()?;
        if let Ok(Some(state)) = self.recorded_state(id) {
            return Ok(state);
        }
        // The state claims that a dead sandbox runs (its end is not recorded yet), or it is
        // unreadable after a power cut: a starting zygote records the end of such sandboxes.
        client::ask(&self.config, &Request::Ping, &[])?;
        Ok(self.recorded_state(id)?.unwrap_or(SandboxState::Dead { reason: "lost".to_owned() }))
    }

    /// The last time a sandbox's processes were killed for exceeding its disk limit. A command that
    /// ended by signal 9 may be one of them.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn last_disk_limit_stop(
        &self,
        id: &SandboxId,
    ) -> Result<Option<DiskLimitStop>, EngineError> {
        read_record(&self.disk.home.sandbox(id).join("stopped.json"))
    }

    /// Every sandbox with a record, running or dead.
    ///
    /// # Errors
    /// When the folder of sandboxes cannot be read.
    pub fn list(&self) -> Result<Vec<SandboxId>, EngineError> {
        self.store.ensure_mounted()?;
        list_ids(&self.disk.home)
    }

    /// Kills all of a sandbox; its disk stays. Idempotent.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn kill(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.store.ensure_mounted()?;
        // When the state is unreadable, the zygote knows.
        let state = RecordedState::read(&self.disk.home, id);
        if !self.disk.home.sandbox(id).exists()
            || matches!(state, Ok(Some(RecordedState::Ended { .. })))
        {
            return Ok(());
        }
        self.ask_done("kill", id, &Request::Kill { id: id.clone() })
    }

    /// Freezes a sandbox's commands. Thaws after five seconds unless renewed.
    ///
    /// # Errors
    /// When it is not running.
    pub fn freeze(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.ask_done("freeze", id, &Request::Freeze { id: id.clone(), hold_millis: None })
    }

    /// As [`Engine::freeze`], to be renewed within `hold`, at most ten minutes.
    ///
    /// # Errors
    /// When it is not running or cannot be frozen in time.
    pub fn freeze_for(&self, id: &SandboxId, hold: Duration) -> Result<(), EngineError> {
        let hold_millis = Some(u64::try_from(hold.as_millis()).unwrap_or(u64::MAX));
        self.ask_done("freeze", id, &Request::Freeze { id: id.clone(), hold_millis })
    }

    /// Thaws a sandbox.
    ///
    /// # Errors
    /// When it is not running.
    pub fn thaw(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.ask_done("thaw", id, &Request::Thaw { id: id.clone() })
    }

    /// Thaws a sandbox unless a snapshot is being taken, which needs the freeze and thaws it
    /// afterwards.
    ///
    /// # Errors
    /// When it is not running.
    pub fn thaw_unless_saving(&self, id: &SandboxId) -> Result<(), EngineError> {
        match file_lock::try_lock_folder(&self.disk.home.sandbox(id))? {
            Some(_turn) => self.thaw(id),
            None => Ok(()),
        }
    }

    /// Kills a sandbox and removes its disk and record. Idempotent.
    ///
    /// # Errors
    /// When the zygote cannot be reached or the disk cannot be removed.
    pub fn remove(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.kill(id)?;
        let Some(thrown) = self.disk.home.discard(&self.disk.home.sandbox(id))? else {
            return Ok(());
        };
        // Deleting a subvolume is instant; a folder waits in the trash for the garbage collector.
        if self.disk.home.store().is_btrfs() {
            trash::delete(&self.disk.home.trash(), &[thrown])?;
        }
        Ok(())
    }

    /// Stops an idle zygote, which would exit by itself after a minute. A store in a file is
    /// unmounted when no sandbox runs and no other process uses it.
    ///
    /// # Errors
    /// When the zygote cannot be reached or the store cannot be unmounted.
    pub fn stop_if_idle(&self) -> Result<(), EngineError> {
        client::ask_if_running(&self.disk.home, &Request::ExitIfIdle)?;
        // Without the store mounted there is nothing to list or unmount.
        for id in list_ids(&self.disk.home).unwrap_or_default() {
            let state = RecordedState::read(&self.disk.home, &id)?;
            if state.is_some_and(|state| state.live_pid().is_some()) {
                return Ok(());
            }
        }
        self.store.unmount_if_unused()
    }

    fn ask_done(
        &self,
        doing: &'static str,
        id: &SandboxId,
        request: &Request,
    ) -> Result<(), EngineError> {
        match client::ask(&self.config, request, &[])? {
            Answer::Done | Answer::Ended { .. } => Ok(()),
            Answer::Failed { reason } => {
                Err(EngineError::Refused { doing, sandbox: id.clone(), reason })
            }
            _ => Err(EngineError::NotRunning { sandbox: id.clone() }),
        }
    }

    pub(crate) fn running(&self, id: &SandboxId, pid: u32) -> Running {
        let run = self.disk.home.sandbox_run(id);
        let (bridge, door) = (run.join("bridge.sock"), run.join(DOOR_SOCKET));
        Running { id: id.clone(), bridge, door, pid }
    }

    /// The recorded state; `None` when it claims that a dead sandbox runs.
    fn recorded_state(&self, id: &SandboxId) -> Result<Option<SandboxState>, EngineError> {
        if !self.disk.home.sandbox(id).exists() {
            return Ok(Some(SandboxState::Gone));
        }
        Ok(match RecordedState::read(&self.disk.home, id)? {
            None => Some(SandboxState::Dead { reason: "never started".to_owned() }),
            Some(RecordedState::Ended { reason, .. }) => Some(SandboxState::Dead { reason }),
            Some(state) => state.live_pid().map(|pid| SandboxState::Running(self.running(id, pid))),
        })
    }

    /// The record to write, the paths of its layers, and the layer its disk is cloned from.
    fn build_record(
        &self,
        spec: &Spec,
    ) -> Result<(Record, Vec<PathBuf>, Option<PathBuf>), EngineError> {
        let (mut layers, config) = self.resolve(&spec.from)?;
        if layers.is_empty() {
            return Err(EngineError::Invalid("a sandbox needs at least one layer".to_owned()));
        }
        if let Some(bind) = spec.binds.iter().find(|bind| !bind.inside.is_absolute()) {
            let reason = format!("`{}` is not an absolute path", bind.inside.display());
            return Err(EngineError::Invalid(reason));
        }
        if spec.settings.bytes() > MAX_SETTINGS_BYTES {
            let reason = format!("the network settings have more than {MAX_SETTINGS_BYTES} bytes");
            return Err(EngineError::Invalid(reason));
        }
        // The disk starts as a clone of the captured top layer, so layer stacks never grow.
        let cloned = self.disk.clone_source(&layers);
        if cloned.is_some() {
            layers.pop();
        }
        let volumes = self.volumes_of(&spec.volumes)?;
        let folders =
            layers.iter().map(|layer| self.disk.layer_path(layer)).collect::<Result<_, _>>()?;
        let record = Record {
            id: spec.id.clone(),
            layers,
            config,
            limits: spec.limits,
            network: spec.network,
            owner: spec.owner,
            binds: spec.binds.clone(),
            volumes: spec.volumes.clone(),
            file_bytes: volume::max_file_bytes(spec.limits.writable_bytes, &volumes),
            env: spec.env.clone(),
            door: spec.door.clone(),
            settings: spec.settings.clone(),
            created_at: std::time::SystemTime::now().into(),
            restarted_at: None,
            snapshot: match &spec.from {
                Origin::Snapshot(snapshot) => Some(snapshot.clone()),
                _ => None,
            },
            made_by: spec.made_by.clone(),
            boot: boot_id().to_owned(),
        };
        Ok((record, folders, cloned))
    }

    /// Opens the files that the zygote cannot reach through its almost empty mount table.
    pub(crate) fn open_descriptors(
        &self,
        record: &Record,
        layers: &[PathBuf],
    ) -> Result<Vec<OwnedFd>, EngineError> {
        let supervisor = &self.config.supervisor;
        let mut files: Vec<OwnedFd> =
            vec![fs::File::open(supervisor).at("open", supervisor)?.into()];
        for path in layers.iter().chain(record.binds.iter().map(|bind| &bind.source)) {
            files.push(syscall::clone_mount(rustix::fs::CWD, path, false).at("open", path)?);
        }
        for mount in &record.volumes {
            files.push(self.volume_attach(&mount.name)?);
        }
        Ok(files)
    }

    /// Creates a sandbox's folder atomically.
    fn record_insert(&self, record: &Record, cloned: Option<&Path>) -> Result<(), EngineError> {
        let name = format!("new-{}", SandboxId::random().part());
        let new = self.disk.home.trash().join(&name);
        let folder = self.disk.home.sandbox(&record.id);
        let make = || {
            fs::DirBuilder::new().mode(0o700).create(&new).at("create", &new)?;
            let begin = cloned.map_or(WritableOrigin::Empty, WritableOrigin::Clone);
            let limit = record.limits.writable_bytes.filter(|_| self.disk.home.has_quotas());
            writable::create(&new, self.disk.home.store(), begin, limit)?;
            write_record_unsynced(&new.join(RECORD), record)?;
            match fs::rename(&new, &folder) {
                Ok(()) => Ok(()),
                Err(_) if folder.exists() => Err(EngineError::Exists(record.id.clone())),
                Err(error) => Err(error).at("create", &folder),
            }
        };
        let made = make();
        if made.is_err() {
            // If the deletion fails, the folder is already in the trash.
            let _ = trash::delete(&self.disk.home.trash(), &[name]);
        }
        made
    }

    /// Syncs the record of a persistent sandbox to disk: its layers may have to be found after a
    /// power cut. A sandbox owned by a process does not survive one.
    fn record_sync(&self, spec: &Spec) -> Result<(), EngineError> {
        if matches!(spec.owner, Owner::Process(_)) {
            return Ok(());
        }
        let folder = self.disk.home.sandbox(&spec.id);
        for path in [&folder.join(RECORD), &folder, &self.disk.home.sandboxes()] {
            sync(path)?;
        }
        Ok(())
    }
}

fn host_resolv_conf(network: Network) -> String {
    match network {
        Network::Door | Network::Nothing => String::new(),
        Network::Host => fs::read_to_string("/etc/resolv.conf").unwrap_or_default(),
    }
}
