//! A sandbox as it is on disk, and what the engine does with it. `record.json` says what it was asked
//! to be and never changes; `state.json` is the zygote's and says how far it has come.

use std::{
    collections::BTreeMap,
    fs,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use harvest_proto::{SandboxId, Timestamp, launch::DOOR_SOCKET};
use serde::{Deserialize, Serialize};

use crate::{
    Engine,
    cgroup::Hierarchy,
    error::{AtPath, EngineError},
    home::{Home, Survives, boot_id, layer_folder, read_record, start_ticks, sync, write_record},
    plan::{HostFacts, Plan, plan},
    spec::{Bind, ImageConfig, LayerId, Limits, Network, Owner, Spec},
    syscall,
    zygote::{
        client,
        protocol::{Answer, Build, Request},
    },
};

// What a sandbox was asked to be.
const RECORD: &str = "record.json";

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
    /// On top of the config's.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) created_at: Timestamp,
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

/// A sandbox that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
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
            env: BTreeMap::new(),
            created_at: Timestamp::from_millis(0),
        }
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
    let folder = home.sandboxes();
    let mut ids = Vec::new();
    for entry in fs::read_dir(&folder).at("list", &folder)? {
        let name = entry.at("list", &folder)?.file_name();
        let id = name.to_str().and_then(|part| format!("{}_{part}", SandboxId::PREFIX).parse().ok());
        ids.extend(id);
    }
    ids.sort();
    Ok(ids)
}

impl Engine {
    /// Starts a sandbox; its bridge can be dialled when this returns.
    ///
    /// # Errors
    /// When its image is missing, its id is taken or the host says no; nothing is left of it then.
    pub fn start(&self, spec: &Spec) -> Result<Running, EngineError> {
        // Until the record is there, nothing says that these layers are in use.
        let _hold = self.disk.hold()?;
        let (record, layers) = self.recorded(spec)?;
        let files = self.handed_over(&record, &layers)?;
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        self.record_insert(&record)?;
        let resolv_conf = host_resolv_conf(record.network);
        let build = self.config.zygote.first().and_then(|program| Build::of(Path::new(program)));
        let request = Request::Start { record: Box::new(record), layers, resolv_conf, build };
        let mut synced = Ok(());
        let answer = client::ask_and(&self.config, &request, &files, &mut || synced = self.record_sync(spec));
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
        let (record, layers) = self.recorded(spec)?;
        let cgroups = Hierarchy::detect().map_err(|error| EngineError::Zygote { reason: error.line() })?;
        let facts =
            HostFacts { cgroups, group: self.home.group(), resolv_conf: host_resolv_conf(record.network) };
        Ok(plan(&record, &layers, &facts))
    }

    /// What became of a sandbox.
    ///
    /// # Errors
    /// When its records cannot be read.
    pub fn find(&self, id: &SandboxId) -> Result<SandboxState, EngineError> {
        if let Some(state) = self.settled(id)? {
            return Ok(state);
        }
        // It says it runs and does not: whoever is to write down the end has not done so yet.
        client::ask(&self.config, &Request::Ping, &[])?;
        Ok(self.settled(id)?.unwrap_or(SandboxState::Dead { reason: "lost".to_owned() }))
    }

    /// Every sandbox with a record, running or dead.
    ///
    /// # Errors
    /// When the folder of sandboxes cannot be read.
    pub fn list(&self) -> Result<Vec<SandboxId>, EngineError> {
        all(&self.home)
    }

    /// Blocks until a sandbox has ended and says why.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub fn wait(&self, id: &SandboxId) -> Result<String, EngineError> {
        if let Some(State::Ended { reason, .. }) = State::read(&self.home, id)? {
            return Ok(reason);
        }
        match client::ask(&self.config, &Request::Wait { id: id.clone() }, &[])? {
            Answer::Ended { reason } => Ok(reason),
            _ => Err(EngineError::NotRunning { sandbox: id.clone() }),
        }
    }

    /// Kills all of a sandbox; its disk stays. Idempotent.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn kill(&self, id: &SandboxId) -> Result<(), EngineError> {
        if !self.home.sandbox(id).exists()
            || matches!(State::read(&self.home, id)?, Some(State::Ended { .. }))
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
        self.done("freeze", id, client::ask(&self.config, &Request::Freeze { id: id.clone() }, &[])?)
    }

    /// Lets a frozen sandbox go on.
    ///
    /// # Errors
    /// When it does not run.
    pub fn thaw(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.done("thaw", id, client::ask(&self.config, &Request::Thaw { id: id.clone() }, &[])?)
    }

    /// Kills a sandbox and throws its disk and record away. Idempotent.
    ///
    /// # Errors
    /// When the zygote cannot be reached or the disk says no.
    pub fn remove(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.kill(id)?;
        self.home.discard(&self.home.sandbox(id))
    }

    /// Lets the zygote go when it has nothing to look after; it would go by itself after a minute.
    ///
    /// # Errors
    /// When it cannot be spoken to.
    pub fn rest(&self) -> Result<(), EngineError> {
        client::ask_if_there(&self.home, &Request::Rest).map(drop)
    }

    fn done(&self, doing: &'static str, id: &SandboxId, answer: Answer) -> Result<(), EngineError> {
        match answer {
            Answer::Done | Answer::Ended { .. } => Ok(()),
            Answer::Failed { reason } => Err(EngineError::Refused { doing, sandbox: id.clone(), reason }),
            _ => Err(EngineError::NotRunning { sandbox: id.clone() }),
        }
    }

    fn running(&self, id: &SandboxId, pid: u32) -> Running {
        let run = self.home.run_of(id);
        Running { id: id.clone(), bridge: run.join("bridge.sock"), door: run.join(DOOR_SOCKET), pid }
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

    fn recorded(&self, spec: &Spec) -> Result<(Record, Vec<PathBuf>), EngineError> {
        let (layers, config) = self.resolve(&spec.from)?;
        if layers.is_empty() {
            return Err(EngineError::Invalid { reason: "a sandbox needs at least one layer".to_owned() });
        }
        if let Some(bind) = spec.binds.iter().find(|bind| !bind.inside.is_absolute()) {
            let reason = format!("`{}` is not an absolute path inside", bind.inside.display());
            return Err(EngineError::Invalid { reason });
        }
        let folders =
            layers.iter().map(|layer| layer_folder(&self.config, layer)).collect::<Result<_, _>>()?;
        let record = Record {
            id: spec.id.clone(),
            layers,
            config,
            limits: spec.limits,
            network: spec.network,
            owner: spec.owner,
            binds: spec.binds.clone(),
            env: spec.env.clone(),
            created_at: std::time::SystemTime::now().into(),
        };
        Ok((record, folders))
    }

    /// Opens what the zygote, with its almost empty mount table, cannot reach by name.
    fn handed_over(&self, record: &Record, layers: &[PathBuf]) -> Result<Vec<OwnedFd>, EngineError> {
        let supervisor = &self.config.supervisor;
        let mut files: Vec<OwnedFd> = vec![fs::File::open(supervisor).at("open", supervisor)?.into()];
        for path in layers.iter().chain(record.binds.iter().map(|bind| &bind.source)) {
            files.push(syscall::tree(rustix::fs::CWD, path, false).at("open", path)?);
        }
        Ok(files)
    }

    /// Puts a sandbox's folder there, whole or not at all.
    fn record_insert(&self, record: &Record) -> Result<(), EngineError> {
        let new = self.home.trash().join(format!("new-{}", SandboxId::random().part()));
        let folder = self.home.sandbox(&record.id);
        let make = |path: &PathBuf, mode: u32| fs::DirBuilder::new().mode(mode).create(path).at("make", path);
        make(&new, 0o700)?;
        // The upper folder's mode is that of `/` inside.
        make(&new.join("upper"), 0o755)?;
        make(&new.join("work"), 0o755)?;
        write_record(&new.join(RECORD), record, Survives::Crash)?;
        match fs::rename(&new, &folder) {
            Ok(()) => Ok(()),
            Err(_) if folder.exists() => {
                let _ = fs::remove_dir_all(&new);
                Err(EngineError::Exists { sandbox: record.id.clone() })
            }
            Err(error) => Err(error).at("make", folder),
        }
    }

    /// Brings the record of a sandbox that is kept to the disk: its layer may have to be found after a
    /// power cut. What lives for a process does not survive one anyway.
    fn record_sync(&self, spec: &Spec) -> Result<(), EngineError> {
        if spec.owner != Owner::Kept {
            return Ok(());
        }
        let folder = self.home.sandbox(&spec.id);
        for path in [&folder.join(RECORD), &folder, &self.home.sandboxes()] {
            sync(path)?;
        }
        Ok(())
    }
}

fn host_resolv_conf(network: Network) -> String {
    match network {
        Network::Door => String::new(),
        Network::Host => fs::read_to_string("/etc/resolv.conf").unwrap_or_default(),
    }
}
