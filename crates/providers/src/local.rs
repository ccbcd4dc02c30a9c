//! The local provider: sandboxes on this machine, by the engine. The one place where the async side
//! meets the synchronous engine; it decides nothing.

use std::{
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use harvest_engine::{
    ASK_AGAIN, Ending, Engine, EngineError, Limits, Network, Origin, Owner, Running, SandboxState,
    SeedCounts, Spec, VolumeName,
};
use harvest_proto::{SandboxId, SnapshotId, event::SnapshotKind};
use harvest_session::{
    disks::Disks,
    provider::{
        BridgeStream, Found, Freezing, Provider, ProviderError, Seeds, Snapshots, StartFrom,
        StartOrder, Started,
    },
};
use tokio::{
    net::{UnixStream, unix::pipe},
    sync::{Mutex, Semaphore},
    task::spawn_blocking,
};

// Each holds a thread. The zygote starts one after another; a few more get ready for it meanwhile.
const STARTS_AT_ONCE: usize = 8;

/// Sandboxes on this machine.
#[derive(Clone)]
pub struct Local {
    engine: Engine,
    limits: Limits,
    starts: Arc<Semaphore>,
    counting: Arc<Mutex<()>>,
}

impl Local {
    /// On top of an engine, every sandbox with these limits.
    #[must_use]
    pub fn new(engine: Engine, limits: Limits) -> Self {
        Self {
            engine,
            limits,
            starts: Arc::new(Semaphore::new(STARTS_AT_ONCE)),
            counting: Arc::default(),
        }
    }

    /// The engine, for a thread of its own.
    pub(crate) fn clone_engine(&self) -> Engine {
        self.engine.clone()
    }

    /// Makes a call of the engine where it may block.
    pub(crate) async fn engine<T: Send + 'static>(
        &self,
        doing: String,
        call: impl FnOnce(&Engine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, ProviderError> {
        let engine = self.engine.clone();
        match spawn_blocking(move || call(&engine)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(translate(doing, error)),
            Err(panicked) => Err(ProviderError::Machine { doing, source: panicked.into() }),
        }
    }
}

#[async_trait]
impl Provider for Local {
    async fn start(&self, order: StartOrder) -> Result<Started, ProviderError> {
        let spec = Spec {
            id: order.sandbox.clone(),
            from: match order.from {
                StartFrom::Image(name) => Origin::Image(name),
                StartFrom::Snapshot(snapshot) => Origin::Snapshot(snapshot),
            },
            limits: self.limits,
            network: Network::Door,
            owner: Owner::Sessions,
            binds: Vec::new(),
            volumes: Vec::new(),
            env: std::collections::BTreeMap::new(),
            made_by: None,
        };
        let doing = format!("cannot start sandbox {}", order.sandbox);
        let _turn = self.starts.acquire().await.expect("it is never closed");
        let running = self.engine(doing, move |engine| start(engine, spec, order.state.as_deref()));
        Ok(started(running.await?))
    }

    async fn find(&self, sandbox: &SandboxId) -> Result<Found, ProviderError> {
        let id = sandbox.clone();
        let state = self
            .engine(format!("cannot find sandbox {sandbox}"), move |engine| engine.find(&id))
            .await?;
        Ok(match state {
            SandboxState::Running(running) => Found::Running(started(running)),
            SandboxState::Dead { reason } => Found::Dead { reason },
            SandboxState::Gone => Found::Gone,
        })
    }

    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError> {
        let id = sandbox.clone();
        let state = self
            .engine(format!("cannot find sandbox {sandbox}"), move |engine| engine.find(&id))
            .await?;
        let SandboxState::Running(running) = state else {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        };
        match dial(&running.bridge).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(source) => Err(ProviderError::Machine {
                doing: format!("cannot dial the supervisor of sandbox {sandbox}"),
                source: source.into(),
            }),
        }
    }

    async fn ended(&self, sandbox: &SandboxId) -> Result<String, ProviderError> {
        let doing = || format!("cannot wait for sandbox {sandbox}");
        loop {
            let id = sandbox.clone();
            let asked = match self.engine(doing(), move |engine| engine.ending(&id)).await? {
                Ending::Over(reason) => return Ok(reason),
                Ending::Asked(asked) => asked,
            };
            // Without a thread: this wait lasts as long as the sandbox. To the runtime a socket that is only waited
            // for is a pipe.
            let system = |source: std::io::Error| ProviderError::Machine {
                doing: doing(),
                source: source.into(),
            };
            let asked = pipe::Receiver::from_owned_fd_unchecked(asked).map_err(system)?;
            asked.readable().await.map_err(system)?;
            let asked = asked.into_blocking_fd().map_err(system)?;
            let answer =
                self.engine.ended(sandbox, &asked).map_err(|error| translate(doing(), error))?;
            if let Some(reason) = answer {
                return Ok(reason);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    async fn end_kept(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        _kind: SnapshotKind,
    ) -> Result<(), ProviderError> {
        let (id, kept) = (sandbox.clone(), snapshot.clone());
        let doing = format!("cannot keep the disk of sandbox {sandbox}");
        self.engine(doing, move |engine| engine.end_kept(&id, &kept)).await.map(|_| ())
    }

    async fn end(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        self.engine(format!("cannot end sandbox {sandbox}"), move |engine| engine.remove(&id)).await
    }

    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError> {
        // Those people made for themselves are none of the sessions' business.
        self.engine("cannot list sandboxes".into(), |engine| engine.list_of(Owner::Sessions)).await
    }

    async fn others(&self) -> Result<Vec<(SandboxId, Option<String>)>, ProviderError> {
        self.engine("cannot list sandboxes".into(), Engine::running_kept).await
    }

    async fn holds(&self, from: &StartFrom) -> Result<bool, ProviderError> {
        let from = from.clone();
        self.engine("cannot look for what to start from".into(), move |engine| match from {
            StartFrom::Image(name) => engine.image(&name).map(|image| image.is_some()),
            StartFrom::Snapshot(id) => engine.snapshot(&id).map(|snapshot| snapshot.is_some()),
        })
        .await
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn disks(&self) -> Option<&dyn Disks> {
        Some(self)
    }

    async fn seeds(&self) -> Option<Seeds> {
        // One at a time: a zygote that does not answer holds a thread for as long as it does not.
        let turn = Arc::clone(&self.counting).try_lock_owned().ok()?;
        let counting = move |engine: &Engine| {
            let _turn = turn;
            engine.seeds()
        };
        let counts = self.engine("cannot count seeds".into(), counting).await.ok().flatten()?;
        let SeedCounts { ready, grown, used, missed } = counts;
        Some(Seeds { ready, grown, used, missed })
    }

    fn freezing(&self) -> Option<&dyn Freezing> {
        Some(self)
    }
}

#[async_trait]
impl Freezing for Local {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        let doing = format!("cannot make sandbox {sandbox} stand still");
        self.engine(doing, move |engine| engine.freeze_for(&id, hold)).await
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        self.engine(format!("cannot thaw sandbox {sandbox}"), move |engine| engine.thaw(&id)).await
    }

    async fn rouse(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        self.engine(format!("cannot rouse sandbox {sandbox}"), move |engine| engine.rouse(&id))
            .await
    }
}

#[async_trait]
impl Snapshots for Local {
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        _kind: SnapshotKind,
    ) -> Result<u64, ProviderError> {
        let (id, kept) = (sandbox.clone(), snapshot.clone());
        let doing = format!("cannot capture the disk of sandbox {sandbox}");
        self.engine(doing, move |engine| engine.capture_for_sessions(&id, &kept))
            .await
            .map(|captured| captured.frozen_millis)
    }

    async fn remove(&self, snapshot: &SnapshotId) -> Result<(), ProviderError> {
        let id = snapshot.clone();
        self.engine(format!("cannot remove snapshot {snapshot}"), move |engine| {
            engine.snapshot_remove(&id)
        })
        .await
    }
}

/// Starts a sandbox with the state of a repository, or without when that cannot be had: work that has to
/// do without a cache is better than none.
fn start(
    engine: &Engine,
    mut spec: Spec,
    repository: Option<&str>,
) -> Result<Running, EngineError> {
    let without = |error: &EngineError, spec: &Spec| {
        tracing::warn!(sandbox = %spec.id, %error, "this sandbox has no /mnt/state");
    };
    match repository.map(|repository| engine.state(&VolumeName::of_repository(repository))) {
        Some(Ok(state)) => spec.volumes.push(state),
        Some(Err(error)) => without(&error, &spec),
        None => {}
    }
    match engine.start(&spec) {
        Err(
            error @ (EngineError::VolumeTool { .. }
            | EngineError::VolumeMissing { .. }
            | EngineError::File { .. }),
        ) if !spec.volumes.is_empty() => {
            without(&error, &spec);
            spec.volumes.clear();
            engine.start(&spec)
        }
        result => result,
    }
}

fn started(running: Running) -> Started {
    Started { door: running.door }
}

/// Dials a Unix socket whose path may be longer than a socket address can hold.
pub(crate) async fn dial(path: &Path) -> std::io::Result<UnixStream> {
    let (_folder, way) = way(path)?;
    UnixStream::connect(way).await
}

/// The same where it may block; for whoever has a runtime later.
pub(crate) fn dial_blocking(path: &Path) -> std::io::Result<std::os::unix::net::UnixStream> {
    let (_folder, way) = way(path)?;
    let stream = std::os::unix::net::UnixStream::connect(way)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// A short path to a socket, for as long as its folder is held.
fn way(path: &Path) -> std::io::Result<(OwnedFd, PathBuf)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    // O_PATH: the folder is only a way to its socket.
    let folder = std::fs::File::options().read(true).custom_flags(0o10_000_000).open(folder)?;
    let folder = OwnedFd::from(folder);
    let way = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    Ok((folder, way))
}

/// The engine's errors in the words a session knows.
fn translate(doing: String, error: EngineError) -> ProviderError {
    match error {
        EngineError::ImageMissing { image } => ProviderError::ImageMissing { image },
        EngineError::SnapshotMissing { snapshot } => ProviderError::SnapshotMissing { snapshot },
        EngineError::NotRunning { sandbox } => ProviderError::NotRunning { sandbox },
        other => ProviderError::Machine { doing, source: Box::new(other) },
    }
}
