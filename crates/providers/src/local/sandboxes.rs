//! Sandboxes on this machine.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, LazyLock},
};

use async_trait::async_trait;
use harvest_engine::{
    Bind, EndWait, Engine, EngineError, Network, Running, SandboxState, Spec, WAIT_RETRY_DELAY,
};
use harvest_images::DebianMirrors;
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{DamagedSandbox, Sandbox, SandboxList},
    event::SnapshotKind,
    launch::NetworkSettings,
};
use harvest_session::{
    DoorListener, DoorSocket, error_chain,
    sandboxes::{
        BridgeStream, ComputeUsage, Created, Found, FreezeControl, Host, ListedSandbox,
        SandboxError, SandboxProvider, SandboxSpec, Snapshots, StandaloneDoors, StartFrom,
        StateVolume,
    },
};
use tokio::net::{UnixStream, unix::pipe};

use super::{
    Local,
    connect::{connect, connect_blocking},
    errors::sandbox_error,
    spec::{api_sandbox, engine_spec, owner},
};

const STARTING: &str = "cannot start a sandbox";

#[async_trait]
impl SandboxProvider for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn set_doors(&self, opener: Arc<dyn StandaloneDoors>) {
        let _ = self.opener.set(opener);
    }

    async fn create(&self, spec: SandboxSpec) -> Result<Created, SandboxError> {
        let (spec, state) = engine_spec(spec, &self.default_limits)?;
        let _permit = self.starts.acquire().await.expect("the semaphore is never closed");
        let start = self.start(spec, state);
        let started = self.engine(STARTING, start);
        Ok(started.await?.0)
    }

    async fn create_connected(
        &self,
        spec: SandboxSpec,
    ) -> Result<(Created, Box<dyn BridgeStream>), SandboxError> {
        let (spec, state) = engine_spec(spec, &self.default_limits)?;
        let _permit = self.starts.acquire().await.expect("the semaphore is never closed");
        let start = self.start(spec, state);
        let started = self.work(STARTING, move |engine| {
            let failed = |error| sandbox_error(STARTING, error);
            let (created, running) = start(engine).map_err(failed)?;
            // On the same thread, which saves a hop before the first command.
            let stream = connect_blocking(&running.bridge);
            Ok((created, stream.map_err(|error| SandboxError::failed(STARTING, error))?))
        });
        let (created, stream) = started.await?;
        let stream = UnixStream::from_std(stream);
        let stream = stream.map_err(|error| SandboxError::failed(STARTING, error))?;
        Ok((created, Box::new(stream)))
    }

    async fn find(&self, sandbox: &SandboxId) -> Result<Found, SandboxError> {
        Ok(match self.state(sandbox).await? {
            SandboxState::Running(_) => Found::Running,
            SandboxState::Dead { reason } => Found::Dead { reason },
            SandboxState::Gone => Found::Gone,
        })
    }

    async fn get(&self, sandbox: &SandboxId) -> Result<Sandbox, SandboxError> {
        let id = sandbox.clone();
        self.work(format!("cannot inspect {sandbox}"), move |engine| get(engine, &id)).await
    }

    async fn get_all(&self) -> Result<SandboxList, SandboxError> {
        self.engine("cannot list sandboxes", list).await
    }

    async fn list(&self) -> Result<Vec<ListedSandbox>, SandboxError> {
        let owners = self.engine("cannot list sandboxes", Engine::owners).await?.into_iter();
        let listed = |(id, of, made_by)| ListedSandbox { id, owner: owner(of), made_by };
        Ok(owners.map(listed).collect())
    }

    async fn connect(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, SandboxError> {
        let stream = connect(&self.running(sandbox).await?.bridge)
            .await
            .map_err(|error| SandboxError::failed(format!("cannot connect to {sandbox}"), error))?;
        Ok(Box::new(stream))
    }

    async fn listen(&self, sandbox: &SandboxId) -> Result<Box<dyn DoorListener>, SandboxError> {
        let socket = DoorSocket::bind(&self.running(sandbox).await?.door).map_err(|error| {
            SandboxError::failed(format!("cannot open the network of {sandbox}"), error)
        })?;
        Ok(Box::new(socket))
    }

    async fn wait(&self, sandbox: &SandboxId) -> Result<String, SandboxError> {
        let doing = || format!("cannot wait for {sandbox}");
        loop {
            let asked = match self.on(sandbox, "wait for", Engine::wait_begin).await? {
                EndWait::Ended(reason) => return Ok(reason),
                EndWait::Pending(asked) => asked,
            };
            // Waits without a thread, because this lasts as long as the sandbox. The runtime can
            // wait for any readable descriptor as a pipe.
            let system = |error: std::io::Error| SandboxError::failed(doing(), error);
            let asked = pipe::Receiver::from_owned_fd_unchecked(asked).map_err(system)?;
            asked.readable().await.map_err(system)?;
            let asked = asked.into_blocking_fd().map_err(system)?;
            let answer = self.engine.wait_finish(sandbox, &asked);
            if let Some(reason) = answer.map_err(|error| sandbox_error(doing(), error))? {
                return Ok(reason);
            }
            tokio::time::sleep(WAIT_RETRY_DELAY).await;
        }
    }

    async fn stop(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.on(sandbox, "stop", Engine::kill).await
    }

    async fn restart(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.on(sandbox, "start", |engine, id| {
            let running = || matches!(engine.find(id), Ok(SandboxState::Running(_)));
            match engine.restart(id) {
                Ok(_) => Ok(()),
                // It was never stopped, or a concurrent request or a crashed server started it.
                Err(_) if running() => Ok(()),
                Err(error) => Err(error),
            }
        })
        .await
    }

    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        _kind: SnapshotKind,
    ) -> Result<(), SandboxError> {
        let snapshot = snapshot.clone();
        let save = move |engine: &Engine, id: &_| engine.stop_and_save(id, &snapshot);
        self.on(sandbox, "save the disk of", save).await.map(drop)
    }

    async fn remove(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.on(sandbox, "remove", Engine::remove).await
    }

    async fn agents(
        &self,
        from: &StartFrom,
    ) -> Result<Option<BTreeMap<String, String>>, SandboxError> {
        let from = from.clone();
        self.engine("cannot look up the image or snapshot", move |engine| {
            let config = match from {
                StartFrom::Image(name) => engine.image(&name)?.map(|image| image.config),
                StartFrom::Snapshot(id) => engine.snapshot(&id)?.map(|snapshot| snapshot.config),
            };
            Ok(config.map(|config| config.agents))
        })
        .await
    }

    async fn exceeded_limit(&self, sandbox: &SandboxId) -> Option<String> {
        let stopped = self.on(sandbox, "read the limits of", Engine::last_disk_limit_stop);
        let stopped = stopped.await.ok()??;
        Some(format!("disk limit of {} bytes reached", stopped.limit_bytes))
    }

    async fn usage(&self, sandbox: &SandboxId) -> Result<Option<ComputeUsage>, SandboxError> {
        let usage = self.on(sandbox, "measure", Engine::usage).await?;
        Ok(usage.map(|usage| ComputeUsage {
            cpu_micros: usage.cpu_micros,
            memory_bytes: usage.memory_bytes,
        }))
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        Some(self)
    }

    fn host(&self) -> Option<&dyn Host> {
        Some(self)
    }
}

impl Local {
    /// The blocking start of a sandbox. The host's settings are read here, because that blocks too.
    fn start(
        &self,
        mut spec: Spec,
        state: Option<StateVolume>,
    ) -> impl FnOnce(&Engine) -> Result<(Created, Running), EngineError> + Send + 'static {
        let (state_bytes, settings) = (self.state_bytes, Arc::clone(&self.settings));
        let mirrors = self.mirrors.clone();
        move |engine| {
            if spec.network != Network::Nothing {
                spec.settings = NetworkSettings::clone(&settings);
                spec.binds.extend(mirrors.and_then(|mirrors| debian_list(engine, &spec, &mirrors)));
            }
            start(engine, spec, state, state_bytes)
        }
    }

    async fn state(&self, sandbox: &SandboxId) -> Result<SandboxState, SandboxError> {
        self.on(sandbox, "find", Engine::find).await
    }

    async fn running(&self, sandbox: &SandboxId) -> Result<Running, SandboxError> {
        match self.state(sandbox).await? {
            SandboxState::Running(running) => Ok(running),
            SandboxState::Dead { .. } => Err(SandboxError::NotRunning { sandbox: sandbox.clone() }),
            SandboxState::Gone => Err(SandboxError::no_sandbox(sandbox)),
        }
    }
}

/// The list of the host's mirrors of Debian. A sandbox works without it, so a failure is logged.
fn debian_list(
    engine: &Engine,
    spec: &Spec,
    mirrors: &(LazyLock<DebianMirrors>, PathBuf),
) -> Option<Bind> {
    let (mirrors, folder) = mirrors;
    if mirrors.is_empty() {
        return None;
    }
    // The start reports a layer that is missing.
    let layers = engine.layer_folders(&spec.from).ok()?;
    mirrors.bind(&layers, folder).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot write the host's mirrors of Debian for sandboxes");
        None
    })
}

/// Starts a sandbox; blocks. Without `/mnt/state`, plus a warning, when the host cannot provide it:
/// working without a cache is better than not at all.
fn start(
    engine: &Engine,
    mut spec: Spec,
    state: Option<StateVolume>,
    state_bytes: u64,
) -> Result<(Created, Running), EngineError> {
    let (asked_for, mut warnings) = (spec.volumes.clone(), Vec::new());
    if spec.network == Network::Host {
        warnings
            .push("it can reach everything the host can, including the host's loopback".to_owned());
    }
    let id = spec.id.clone();
    let without = |error: &EngineError| {
        tracing::warn!(sandbox = %id, error = error_chain(error), "a sandbox starts without /mnt/state");
        format!("without /mnt/state: {}", error_chain(error))
    };
    let state = state.map(|state| match state {
        StateVolume::Repository(owner) => engine.state(Some(&owner), state_bytes),
        StateVolume::Standalone => engine.state(None, state_bytes),
    });
    match state {
        Some(Ok(state)) => spec.volumes.push(state),
        Some(Err(error)) => warnings.push(without(&error)),
        None => {}
    }
    let running = match engine.start(&spec) {
        Err(error) if is_volume_error(&error) && spec.volumes.len() > asked_for.len() => {
            spec.volumes = asked_for;
            // The state volume was the cause only if the start without it succeeds.
            let running = engine.start(&spec)?;
            warnings.push(without(&error));
            running
        }
        other => other?,
    };
    Ok((Created { warnings }, running))
}

fn is_volume_error(error: &EngineError) -> bool {
    use EngineError as Error;
    matches!(error, Error::VolumeTool { .. } | Error::VolumeMissing { .. } | Error::File { .. })
}

fn list(engine: &Engine) -> Result<SandboxList, EngineError> {
    let images = engine.images()?;
    let mut list = SandboxList::default();
    for id in engine.list()? {
        match engine.inspect(&id) {
            // One unreadable record must not hide the others.
            Err(error @ EngineError::Record { .. }) => {
                list.damaged.push(DamagedSandbox { id, error: error_chain(&error) });
            }
            // `None`: removed between listing and inspecting.
            found => list.items.extend(found?.map(|sandbox| api_sandbox(sandbox, &images))),
        }
    }
    list.items.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
    Ok(list)
}

fn get(engine: &Engine, id: &SandboxId) -> Result<Sandbox, SandboxError> {
    let found = inspect(engine, id)?;
    let images = engine.images().map_err(|error| sandbox_error("cannot list images", error))?;
    Ok(api_sandbox(found, &images))
}

fn inspect(engine: &Engine, id: &SandboxId) -> Result<harvest_engine::Inspected, SandboxError> {
    match engine.inspect(id) {
        Ok(Some(found)) => Ok(found),
        Ok(None) => Err(SandboxError::no_sandbox(id)),
        Err(error @ EngineError::Record { .. }) => {
            let hint = format!("`harvest sandbox rm --force {id}` removes what is left of it");
            Err(SandboxError::conflict("record_damaged", error_chain(&error), hint))
        }
        Err(error) => Err(sandbox_error(format!("cannot inspect {id}"), error)),
    }
}
