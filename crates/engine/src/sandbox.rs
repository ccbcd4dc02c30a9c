//! A sandbox as it is on disk, and what the engine does with it. `record.json` says what it was asked
//! to be and changes only when it is started again; `state.json` is the zygote's and says how far it has come.

mod record;

use std::{
    fs,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use harvest_proto::{SandboxId, launch::DOOR_SOCKET};
use serde::Serialize;

use crate::{
    Engine,
    cgroup::Hierarchy,
    disk,
    error::{AtPath, EngineError},
    facts,
    home::{Survives, read_record, sync, write_record},
    plan::{HostFacts, Ids, Plan, plan},
    room::What,
    spec::{Network, Origin, Owner, Spec},
    syscall, trash, volume,
    writable::{self, Begin},
    zygote::{
        client,
        protocol::{Answer, Build, Request},
    },
};
use record::RECORD;
pub use record::Stopped;
pub(crate) use record::{Record, State, all, parts_in};

/// A sandbox that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Running {
    /// Its id.
    pub id: SandboxId,
    /// The socket on which its supervisor answers.
    pub bridge: PathBuf,
    /// Where the gateway binds its socket for this sandbox.
    pub door: PathBuf,
    /// Pid 1's pid on the host.
    pub pid: u32,
}

/// What became of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum SandboxState {
    /// It runs.
    Running(Running),
    /// It is dead; its disk is there still.
    Dead {
        /// Why it died, as far as anyone knows.
        reason: String,
    },
    /// Nothing is left of it.
    Gone,
}

impl Engine {
    /// Starts a sandbox; its bridge can be dialled when this returns.
    ///
    /// # Errors
    /// When its image is missing, its id is taken or the host says no; nothing is left of it then.
    pub fn start(&self, spec: &Spec) -> Result<Running, EngineError> {
        self.store.wake()?;
        self.has_room(What::Sandbox)?;
        // Until the record is there, nothing says that these layers are in use.
        let _hold = self.disk.hold()?;
        let (record, layers, cloned) = self.recorded(spec)?;
        let files = self.handed_over(&record, &layers)?;
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        self.record_insert(&record, cloned.as_deref())?;
        let resolv_conf = host_resolv_conf(record.network);
        let build = self.build();
        let request =
            Request::Start { record: Box::new(record), layers, resolv_conf, build, again: false };
        let mut synced = Ok(());
        let answer = client::ask_and(&self.config, &request, &files, &mut || {
            synced = self.record_sync(spec)
        });
        let reason = match synced.and(answer) {
            Ok(Answer::Started { pid }) => return Ok(self.running(&spec.id, pid)),
            Ok(Answer::Failed { reason } | Answer::Ended { reason }) => reason,
            Ok(other) => format!("unexpected answer {other:?}"),
            Err(error) => {
                let _ = self.remove(&spec.id);
                return Err(error);
            }
        };
        self.remove(&spec.id)?;
        Err(EngineError::Refused { doing: "start", sandbox: spec.id.clone(), reason })
    }

    /// The steps [`Engine::start`] would take.
    ///
    /// # Errors
    /// When the image is missing or the host lacks cgroups.
    pub fn plan(&self, spec: &Spec) -> Result<Plan, EngineError> {
        self.store.wake()?;
        let (record, layers, _) = self.recorded(spec)?;
        let cgroups =
            Hierarchy::detect().map_err(|error| EngineError::Zygote { reason: error.line() })?;
        let facts = HostFacts {
            cgroups,
            group: self.home.group(),
            resolv_conf: host_resolv_conf(record.network),
            redirect: facts::redirect_in_a_thread(),
            ids: Ids::here(),
        };
        Ok(plan(&record, &layers, &facts))
    }

    /// What became of a sandbox.
    ///
    /// # Errors
    /// When its records cannot be read.
    pub fn find(&self, id: &SandboxId) -> Result<SandboxState, EngineError> {
        self.store.wake()?;
        if let Ok(Some(state)) = self.settled(id) {
            return Ok(state);
        }
        // It says it runs and does not: whoever is to write down the end has not done so yet. Or it says
        // nothing, after a power cut: a zygote that starts writes down the end of what it cannot read.
        client::ask(&self.config, &Request::Ping, &[])?;
        Ok(self.settled(id)?.unwrap_or(SandboxState::Dead { reason: "lost".to_owned() }))
    }

    /// The last time what ran in a sandbox was stopped because its disk had become too full. A command
    /// that ended by signal 9 may have ended so.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn stopped(&self, id: &SandboxId) -> Result<Option<Stopped>, EngineError> {
        read_record(&self.home.sandbox(id).join("stopped.json"))
    }

    /// Every sandbox with a record, running or dead.
    ///
    /// # Errors
    /// When the folder of sandboxes cannot be read.
    pub fn list(&self) -> Result<Vec<SandboxId>, EngineError> {
        self.store.wake()?;
        all(&self.home)
    }

    /// Kills all of a sandbox; its disk stays. Idempotent.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn kill(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.store.wake()?;
        // A state that cannot be read says nothing: then the zygote knows.
        if !self.home.sandbox(id).exists()
            || matches!(State::read(&self.home, id), Ok(Some(State::Ended { .. })))
        {
            return Ok(());
        }
        self.done("kill", id, client::ask(&self.config, &Request::Kill { id: id.clone() }, &[])?)
    }

    /// Stops a sandbox's commands in their tracks. To be renewed within five seconds.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self, id: &SandboxId) -> Result<(), EngineError> {
        let request = Request::Freeze { id: id.clone(), hold_millis: None };
        self.done("freeze", id, client::ask(&self.config, &request, &[])?)
    }

    /// As [`Engine::freeze`], to be renewed within `hold`, at most ten minutes. A zygote of an earlier build
    /// wants it renewed within five seconds all the same.
    ///
    /// # Errors
    /// When it does not run, or does not come to a stop.
    pub fn freeze_for(&self, id: &SandboxId, hold: Duration) -> Result<(), EngineError> {
        let hold_millis = Some(u64::try_from(hold.as_millis()).unwrap_or(u64::MAX));
        let request = Request::Freeze { id: id.clone(), hold_millis };
        self.done("freeze", id, client::ask(&self.config, &request, &[])?)
    }

    /// Lets a frozen sandbox go on.
    ///
    /// # Errors
    /// When it does not run.
    pub fn thaw(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.done("thaw", id, client::ask(&self.config, &Request::Thaw { id: id.clone() }, &[])?)
    }

    /// The same, unless its disk is being kept: it must stand still then, and goes on afterwards by itself.
    ///
    /// # Errors
    /// When it does not run.
    pub fn rouse(&self, id: &SandboxId) -> Result<(), EngineError> {
        match disk::try_lock_folder(&self.home.sandbox(id))? {
            Some(_turn) => self.thaw(id),
            None => Ok(()),
        }
    }

    /// Kills a sandbox and throws its disk and record away. Idempotent.
    ///
    /// # Errors
    /// When the zygote cannot be reached or the disk says no.
    pub fn remove(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.kill(id)?;
        let Some(thrown) = self.home.discard(&self.home.sandbox(id))? else { return Ok(()) };
        // A subvolume is gone in no time; a folder is left to who has time.
        if self.disk.store().is_btrfs() {
            trash::delete(&self.home.trash(), &[thrown])?;
        }
        Ok(())
    }

    /// Lets the zygote go when it has nothing to look after; it would go by itself after a minute. A
    /// store in a file is unmounted when nothing runs and no other process uses it.
    ///
    /// # Errors
    /// When the zygote cannot be spoken to or the host does not let the store go.
    pub fn rest(&self) -> Result<(), EngineError> {
        client::ask_if_there(&self.home, &Request::Rest)?;
        // Without the store mounted there is nothing to list, and nothing to let go of.
        for id in all(&self.home).unwrap_or_default() {
            if State::read(&self.home, &id)?.is_some_and(|state| state.living().is_some()) {
                return Ok(());
            }
        }
        self.store.rest()
    }

    fn done(&self, doing: &'static str, id: &SandboxId, answer: Answer) -> Result<(), EngineError> {
        match answer {
            Answer::Done | Answer::Ended { .. } => Ok(()),
            Answer::Failed { reason } => {
                Err(EngineError::Refused { doing, sandbox: id.clone(), reason })
            }
            _ => Err(EngineError::NotRunning { sandbox: id.clone() }),
        }
    }

    /// The program a zygote would be started from now.
    pub(crate) fn build(&self) -> Option<Build> {
        self.config.zygote.first().and_then(|program| Build::of(Path::new(program)))
    }

    pub(crate) fn running(&self, id: &SandboxId, pid: u32) -> Running {
        let run = self.home.run_of(id);
        Running {
            id: id.clone(),
            bridge: run.join("bridge.sock"),
            door: run.join(DOOR_SOCKET),
            pid,
        }
    }

    /// What the records say, unless they say that it runs and it does not.
    fn settled(&self, id: &SandboxId) -> Result<Option<SandboxState>, EngineError> {
        if !self.home.sandbox(id).exists() {
            return Ok(Some(SandboxState::Gone));
        }
        Ok(match State::read(&self.home, id)? {
            None => Some(SandboxState::Dead { reason: "never started".to_owned() }),
            Some(State::Ended { reason, .. }) => Some(SandboxState::Dead { reason }),
            Some(state) => state.living().map(|pid| SandboxState::Running(self.running(id, pid))),
        })
    }

    /// What is to be written down, where its layers are, and the layer its disk is a clone of.
    fn recorded(
        &self,
        spec: &Spec,
    ) -> Result<(Record, Vec<PathBuf>, Option<PathBuf>), EngineError> {
        let (mut layers, config) = self.resolve(&spec.from)?;
        if layers.is_empty() {
            return Err(EngineError::Invalid {
                reason: "a sandbox needs at least one layer".to_owned(),
            });
        }
        if let Some(bind) = spec.binds.iter().find(|bind| !bind.inside.is_absolute()) {
            let reason = format!("`{}` is not an absolute path inside", bind.inside.display());
            return Err(EngineError::Invalid { reason });
        }
        // A disk begins as a clone of what was captured on top of the rest, so stacks never grow.
        let cloned = self.disk.cloned(&layers);
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
            network: if spec.network == Network::Host { Network::Host } else { Network::Door },
            owner: if spec.owner == Owner::Sessions { Owner::Kept } else { spec.owner },
            binds: spec.binds.clone(),
            volumes: spec.volumes.clone(),
            file_bytes: volume::largest_file(spec.limits.writable_bytes, &volumes),
            env: spec.env.clone(),
            created_at: std::time::SystemTime::now().into(),
            sealed: spec.network == Network::Nothing,
            of_sessions: spec.owner == Owner::Sessions,
            again_at: None,
            snapshot: match &spec.from {
                Origin::Snapshot(snapshot) => Some(snapshot.clone()),
                _ => None,
            },
            made_by: spec.made_by.clone(),
        };
        Ok((record, folders, cloned))
    }

    /// Opens what the zygote, with its almost empty mount table, cannot reach by name.
    pub(crate) fn handed_over(
        &self,
        record: &Record,
        layers: &[PathBuf],
    ) -> Result<Vec<OwnedFd>, EngineError> {
        let supervisor = &self.config.supervisor;
        let mut files: Vec<OwnedFd> =
            vec![fs::File::open(supervisor).at("open", supervisor)?.into()];
        for path in layers.iter().chain(record.binds.iter().map(|bind| &bind.source)) {
            files.push(syscall::tree(rustix::fs::CWD, path, false).at("open", path)?);
        }
        for mount in &record.volumes {
            files.push(self.volume_attach(&mount.name)?);
        }
        Ok(files)
    }

    /// Puts a sandbox's folder there, whole or not at all.
    fn record_insert(&self, record: &Record, cloned: Option<&Path>) -> Result<(), EngineError> {
        let name = format!("new-{}", SandboxId::random().part());
        let new = self.home.trash().join(&name);
        let folder = self.home.sandbox(&record.id);
        let make = || {
            fs::DirBuilder::new().mode(0o700).create(&new).at("make", &new)?;
            let begin = cloned.map_or(Begin::Empty, Begin::Clone);
            let limit = record.limits.writable_bytes.filter(|_| self.home.has_quotas());
            writable::make(&new, self.disk.store(), begin, limit)?;
            write_record(&new.join(RECORD), record, Survives::Crash)?;
            match fs::rename(&new, &folder) {
                Ok(()) => Ok(()),
                Err(_) if folder.exists() => {
                    Err(EngineError::Exists { sandbox: record.id.clone() })
                }
                Err(error) => Err(error).at("make", &folder),
            }
        };
        let made = make();
        if made.is_err() {
            // What cannot be deleted now is in the trash already.
            let _ = trash::delete(&self.home.trash(), &[name]);
        }
        made
    }

    /// Brings the record of a sandbox that is kept to the disk: its layer may have to be found after a
    /// power cut. What lives for a process does not survive one anyway.
    fn record_sync(&self, spec: &Spec) -> Result<(), EngineError> {
        if matches!(spec.owner, Owner::Process(_)) {
            return Ok(());
        }
        let folder = self.home.sandbox(&spec.id);
        for path in [&folder.join(RECORD), &folder, &self.home.sandboxes()] {
            sync(path)?;
        }
        Ok(())
    }
}

pub(crate) fn host_resolv_conf(network: Network) -> String {
    match network {
        Network::Door | Network::Nothing => String::new(),
        Network::Host => fs::read_to_string("/etc/resolv.conf").unwrap_or_default(),
    }
}
