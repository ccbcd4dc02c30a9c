//! The local provider: sandboxes on this machine, run by the engine. Bridges async callers to the
//! synchronous engine; contains no policy.

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
    EndWait, Engine, EngineError, Limits, Network, Origin, Owner, Running, SandboxState, Spec,
    VolumeName, WAIT_RETRY_DELAY,
};
use harvest_proto::{SandboxId, SnapshotId, event::SnapshotKind};
use harvest_session::{
    disks::Disks,
    provider::{
        BridgeStream, Found, FreezeControl, Provider, ProviderError, Snapshots, StandbyCounts,
        StartFrom, StartSpec, Started,
    },
};
use tokio::{
    net::{UnixStream, unix::pipe},
    sync::{Mutex, Semaphore},
    task::spawn_blocking,
};

// Each start holds a thread. The zygote starts sandboxes one at a time; a few more prepare
// meanwhile.
const CONCURRENT_STARTS: usize = 8;

/// Sandboxes on this machine.
#[derive(Clone)]
pub struct Local {
    engine: Engine,
    limits: Limits,
    starts: Arc<Semaphore>,
    counting: Arc<Mutex<()>>,
}

impl Local {
    /// Every sandbox gets `limits`.
    #[must_use]
    pub fn new(engine: Engine, limits: Limits) -> Self {
        Self {
            engine,
            limits,
            starts: Arc::new(Semaphore::new(CONCURRENT_STARTS)),
            counting: Arc::default(),
        }
    }

    pub(crate) fn clone_engine(&self) -> Engine {
        self.engine.clone()
    }

    /// Calls the engine on a blocking thread.
    pub(crate) async fn engine<T: Send + 'static>(
        &self,
        doing: String,
        call: impl FnOnce(&Engine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, ProviderError> {
        let engine = self.engine.clone();
        match spawn_blocking(move || call(&engine)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(provider_error(doing, error)),
            Err(panicked) => Err(ProviderError::Failed { doing, source: panicked.into() }),
        }
    }
}

#[async_trait]
impl Provider for Local {
    async fn start(&self, order: StartSpec) -> Result<Started, ProviderError> {
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
        let _permit = self.starts.acquire().await.expect("the semaphore is never closed");
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
            Err(source) => Err(ProviderError::Failed {
                doing: format!("cannot connect to the supervisor of sandbox {sandbox}"),
                source: source.into(),
            }),
        }
    }

    async fn wait_for_exit(&self, sandbox: &SandboxId) -> Result<String, ProviderError> {
        let doing = || format!("cannot wait for sandbox {sandbox}");
        loop {
            let id = sandbox.clone();
            let asked = match self.engine(doing(), move |engine| engine.wait_begin(&id)).await? {
                EndWait::Ended(reason) => return Ok(reason),
                EndWait::Pending(asked) => asked,
            };
            // Waits without a thread, because this lasts as long as the sandbox. The runtime can
            // wait for any readable descriptor as a pipe.
            let system = |source: std::io::Error| ProviderError::Failed {
                doing: doing(),
                source: source.into(),
            };
            let asked = pipe::Receiver::from_owned_fd_unchecked(asked).map_err(system)?;
            asked.readable().await.map_err(system)?;
            let asked = asked.into_blocking_fd().map_err(system)?;
            let answer = self
                .engine
                .wait_finish(sandbox, &asked)
                .map_err(|error| provider_error(doing(), error))?;
            if let Some(reason) = answer {
                return Ok(reason);
            }
            tokio::time::sleep(WAIT_RETRY_DELAY).await;
        }
    }

    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        _kind: SnapshotKind,
    ) -> Result<(), ProviderError> {
        let (id, snapshot) = (sandbox.clone(), snapshot.clone());
        let doing = format!("cannot save the disk of sandbox {sandbox}");
        self.engine(doing, move |engine| engine.stop_and_save(&id, &snapshot)).await.map(|_| ())
    }

    async fn remove(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        self.engine(format!("cannot remove sandbox {sandbox}"), move |engine| engine.remove(&id))
            .await
    }

    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError> {
        // Standalone sandboxes are not listed.
        self.engine("cannot list sandboxes".into(), |engine| engine.list_owned_by(Owner::Sessions))
            .await
    }

    async fn list_standalone(&self) -> Result<Vec<(SandboxId, Option<String>)>, ProviderError> {
        self.engine("cannot list sandboxes".into(), Engine::running_standalone).await
    }

    async fn can_start_from(&self, from: &StartFrom) -> Result<bool, ProviderError> {
        let from = from.clone();
        self.engine("cannot look up the image or snapshot".into(), move |engine| match from {
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

    async fn standby(&self) -> Option<StandbyCounts> {
        // One query at a time: a zygote that does not answer blocks a thread.
        let guard = Arc::clone(&self.counting).try_lock_owned().ok()?;
        let counting = move |engine: &Engine| {
            let _guard = guard;
            engine.standby_counts()
        };
        let counts =
            self.engine("cannot count standby processes".into(), counting).await.ok().flatten()?;
        let harvest_engine::StandbyCounts { ready, preforked, used, missed } = counts;
        Some(StandbyCounts { ready, preforked, used, missed })
    }

    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        Some(self)
    }
}

#[async_trait]
impl FreezeControl for Local {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        let doing = format!("cannot freeze sandbox {sandbox}");
        self.engine(doing, move |engine| engine.freeze_for(&id, hold)).await
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        self.engine(format!("cannot thaw sandbox {sandbox}"), move |engine| engine.thaw(&id)).await
    }

    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        let id = sandbox.clone();
        self.engine(format!("cannot thaw sandbox {sandbox}"), move |engine| {
            engine.thaw_unless_saving(&id)
        })
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
        let (id, snapshot) = (sandbox.clone(), snapshot.clone());
        let doing = format!("cannot capture the disk of sandbox {sandbox}");
        self.engine(doing, move |engine| engine.capture_for_sessions(&id, &snapshot))
            .await
            .map(|captured| captured.frozen_millis)
    }

    async fn snapshot_remove(&self, snapshot: &SnapshotId) -> Result<(), ProviderError> {
        let id = snapshot.clone();
        self.engine(format!("cannot remove snapshot {snapshot}"), move |engine| {
            engine.snapshot_remove(&id)
        })
        .await
    }
}

/// Starts a sandbox with the state volume of a repository, or without it when the volume is
/// unavailable: working without a cache is better than not at all.
fn start(
    engine: &Engine,
    mut spec: Spec,
    repository: Option<&str>,
) -> Result<Running, EngineError> {
    let warn = |error: &EngineError, spec: &Spec| {
        tracing::warn!(sandbox = %spec.id, %error, "the sandbox starts without /mnt/state");
    };
    match repository.map(|repository| engine.state(&VolumeName::of_repository(repository))) {
        Some(Ok(state)) => spec.volumes.push(state),
        Some(Err(error)) => warn(&error, &spec),
        None => {}
    }
    match engine.start(&spec) {
        Err(
            error @ (EngineError::VolumeTool { .. }
            | EngineError::VolumeMissing { .. }
            | EngineError::File { .. }),
        ) if !spec.volumes.is_empty() => {
            warn(&error, &spec);
            spec.volumes.clear();
            engine.start(&spec)
        }
        result => result,
    }
}

fn started(running: Running) -> Started {
    Started { door: running.door }
}

/// Connects to a Unix socket whose path may be longer than a socket address can hold.
pub(crate) async fn dial(path: &Path) -> std::io::Result<UnixStream> {
    let (_folder, short) = short_path(path)?;
    UnixStream::connect(short).await
}

/// As [`dial`], blocking. The stream is non-blocking, ready for a runtime.
pub(crate) fn dial_blocking(path: &Path) -> std::io::Result<std::os::unix::net::UnixStream> {
    let (_folder, short) = short_path(path)?;
    let stream = std::os::unix::net::UnixStream::connect(short)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// A short path to a socket, valid while the returned descriptor of its folder is open.
fn short_path(path: &Path) -> std::io::Result<(OwnedFd, PathBuf)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    // O_PATH: the folder is only used to resolve the socket.
    let folder = std::fs::File::options().read(true).custom_flags(0o10_000_000).open(folder)?;
    let folder = OwnedFd::from(folder);
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    Ok((folder, short))
}

fn provider_error(doing: String, error: EngineError) -> ProviderError {
    match error {
        EngineError::ImageMissing { image } => ProviderError::ImageMissing { image },
        EngineError::SnapshotMissing { snapshot } => ProviderError::SnapshotMissing { snapshot },
        EngineError::NotRunning { sandbox } => ProviderError::NotRunning { sandbox },
        other => ProviderError::Failed { doing, source: Box::new(other) },
    }
}
