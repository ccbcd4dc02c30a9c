//! Standalone sandboxes on this machine.

use async_trait::async_trait;
use harvest_engine::{
    Engine, EngineError, Limits, Network, Origin, Owner, Running, SandboxState, Spec, VolumeName,
};
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{
        CreatedSandbox, DamagedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxList,
        SandboxSnapshot, SandboxStatus,
    },
};
use harvest_session::{
    provider::{BridgeStream, Provider as _, ProviderError},
    standalone::{CreatedEphemeral, ForkSpec, HostError, NewSandbox, Sandboxes},
};
use tokio::net::UnixStream;

use super::{
    LocalSandboxHost,
    errors::{conflict, error_chain, host_error, no_such_sandbox, not_running},
    spec::{api_sandbox, spec},
};
use crate::local::{Local, dial, dial_blocking};

const STARTING: &str = "cannot start a sandbox";

#[async_trait]
impl Sandboxes for LocalSandboxHost {
    async fn sandbox_create(&self, new: NewSandbox) -> Result<CreatedSandbox, HostError> {
        let with_state = new.order.state.unwrap_or(true);
        let spec = spec(new, Owner::Standalone)?;
        let started = self.call_engine(STARTING, move |engine| start(engine, spec, with_state));
        Ok(started.await?.0)
    }

    async fn sandbox_create_ephemeral(
        &self,
        new: NewSandbox,
    ) -> Result<CreatedEphemeral, HostError> {
        let with_state = new.order.state.unwrap_or(true);
        let spec = spec(new, Owner::Process(std::process::id()))?;
        let started = self.work(STARTING, move |engine| {
            let failed = |error| host_error(STARTING.to_owned(), error);
            let (created, running) = start(engine, spec, with_state).map_err(failed)?;
            // On the same thread, which saves a hop before the first command.
            dial_blocking(&running.bridge).map(|stream| (created, stream)).map_err(|error| {
                let _ = engine.remove(&running.id);
                HostError::Failed { doing: STARTING.to_owned(), hint: None, source: error.into() }
            })
        });
        let (created, stream) = started.await?;
        match UnixStream::from_std(stream) {
            Ok(stream) => Ok(CreatedEphemeral { created, bridge: Box::new(stream) }),
            Err(error) => {
                self.sandbox_delete(&created.sandbox_id, true).await?;
                Err(HostError::Failed {
                    doing: STARTING.to_owned(),
                    hint: None,
                    source: error.into(),
                })
            }
        }
    }

    async fn sandbox_list(&self) -> Result<SandboxList, HostError> {
        self.call_engine("cannot list sandboxes", list).await
    }

    async fn sandbox_get(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        let id = sandbox.clone();
        self.work(format!("cannot inspect {sandbox}"), move |engine| get(engine, &id)).await
    }

    async fn sandbox_delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), HostError> {
        let (id, doing) = (sandbox.clone(), format!("cannot remove {sandbox}"));
        self.work(doing.clone(), move |engine| {
            if !force {
                check_standalone(engine, &id, "remove")?;
            } else if matches!(engine.find(&id), Ok(SandboxState::Gone)) {
                return Err(no_such_sandbox(&id));
            }
            engine.remove(&id).map_err(|error| host_error(doing, error))
        })
        .await
    }

    async fn sandbox_stop(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        let (id, doing) = (sandbox.clone(), format!("cannot stop {sandbox}"));
        self.work(doing.clone(), move |engine| {
            check_standalone(engine, &id, "stop")?;
            engine.kill(&id).map_err(|error| host_error(doing, error))?;
            get(engine, &id)
        })
        .await
    }

    async fn sandbox_start(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        let (id, doing) = (sandbox.clone(), format!("cannot start {sandbox}"));
        self.work(doing.clone(), move |engine| {
            check_standalone(engine, &id, "start")?;
            let start = || match engine.find(&id)? {
                SandboxState::Running(_) => Ok(()),
                _ => engine.restart(&id).map(drop),
            };
            match start() {
                // A concurrent request started it.
                Ok(()) | Err(EngineError::Exists { .. }) => get(engine, &id),
                // A server that crashed meanwhile had already started it.
                Err(_) if matches!(engine.find(&id), Ok(SandboxState::Running(_))) => {
                    get(engine, &id)
                }
                Err(error) => Err(host_error(doing, error)),
            }
        })
        .await
    }

    async fn sandbox_snapshot(
        &self,
        sandbox: &SandboxId,
        snapshot: SnapshotId,
    ) -> Result<SandboxSnapshot, HostError> {
        let (id, doing) = (sandbox.clone(), format!("cannot take a snapshot of {sandbox}"));
        self.work(doing.clone(), move |engine| {
            inspect(engine, &id)?;
            // Synced before the reply: this process may exit before a background sync would run.
            let captured = engine.capture(&id, &snapshot).and_then(|captured| {
                engine.snapshots_sync()?;
                Ok(captured)
            });
            let captured = captured.map_err(|error| host_error(doing, error))?;
            let (frozen_millis, bytes) = (captured.frozen_millis, captured.bytes);
            Ok(SandboxSnapshot { id: snapshot, sandbox: id, frozen_millis, bytes })
        })
        .await
    }

    async fn sandbox_fork(
        &self,
        sandbox: &SandboxId,
        forks: ForkSpec,
    ) -> Result<ForkedSandbox, HostError> {
        let id = sandbox.clone();
        self.work(format!("cannot fork {sandbox}"), move |engine| fork(engine, id, forks)).await
    }

    async fn sandbox_restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, HostError> {
        let (id, to) = (sandbox.clone(), snapshot.clone());
        self.work(format!("cannot restore {sandbox}"), move |engine| restore(engine, id, to)).await
    }

    async fn sandbox_dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, HostError> {
        let (id, doing) = (sandbox.clone(), format!("cannot connect to {sandbox}"));
        let bridge = self.work(doing.clone(), move |engine| {
            // A session's sandbox may be frozen or paused at any time; commands must go through the
            // session.
            check_standalone(engine, &id, "run a command in")?;
            match engine.find(&id).map_err(|error| host_error(doing, error))? {
                SandboxState::Running(running) => Ok(running.bridge),
                SandboxState::Dead { .. } => Err(not_running(&id)),
                SandboxState::Gone => Err(no_such_sandbox(&id)),
            }
        });
        match dial(&bridge.await?).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(source) => Err(HostError::Failed {
                doing: format!("cannot connect to the supervisor of {sandbox}"),
                hint: None,
                source: source.into(),
            }),
        }
    }

    async fn sandbox_wait(&self, sandbox: &SandboxId) -> Result<(), HostError> {
        let local = Local::new(self.engine.clone(), Limits::default());
        match local.wait_for_exit(sandbox).await {
            // An unknown sandbox counts as exited.
            Ok(_) | Err(ProviderError::NotRunning { .. }) => Ok(()),
            Err(error) => Err(HostError::Failed {
                doing: format!("cannot wait for {sandbox}"),
                hint: None,
                source: error.into(),
            }),
        }
    }

    async fn sandbox_exit_reason(&self, sandbox: &SandboxId) -> Option<String> {
        let id = sandbox.clone();
        match self
            .call_engine("cannot find the sandbox", move |engine| engine.find(&id))
            .await
            .ok()?
        {
            SandboxState::Running(_) => None,
            SandboxState::Dead { reason } => Some(reason),
            SandboxState::Gone => Some("removed".to_owned()),
        }
    }

    async fn sandbox_exceeded_limit(&self, sandbox: &SandboxId) -> Option<String> {
        let id = sandbox.clone();
        let stopped = self
            .call_engine("cannot read why it stopped", move |engine| {
                engine.last_disk_limit_stop(&id)
            })
            .await
            .ok()??;
        Some(format!("disk limit of {} bytes reached", stopped.limit_bytes))
    }
}

/// Starts a sandbox; blocks. Without `/mnt/state`, plus a warning, when the host cannot provide it.
fn start(
    engine: &Engine,
    mut spec: Spec,
    with_state: bool,
) -> Result<(CreatedSandbox, Running), EngineError> {
    let (asked_for, mut warnings) = (spec.volumes.clone(), Vec::new());
    if spec.network == Network::Host {
        warnings
            .push("it can reach everything the host can, including the host's loopback".to_owned());
    }
    let without = |error: &EngineError| format!("without /mnt/state: {}", error_chain(error));
    if with_state {
        match engine.state(&VolumeName::of_commands()) {
            Ok(state) => spec.volumes.push(state),
            Err(error) => warnings.push(without(&error)),
        }
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
    Ok((CreatedSandbox { sandbox_id: spec.id, status: SandboxStatus::Running, warnings }, running))
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

fn get(engine: &Engine, id: &SandboxId) -> Result<Sandbox, HostError> {
    let found = inspect(engine, id)?;
    let images =
        engine.images().map_err(|error| host_error("cannot list images".to_owned(), error))?;
    Ok(api_sandbox(found, &images))
}

fn inspect(engine: &Engine, id: &SandboxId) -> Result<harvest_engine::Inspected, HostError> {
    match engine.inspect(id) {
        Ok(Some(found)) => Ok(found),
        Ok(None) => Err(no_such_sandbox(id)),
        Err(error @ EngineError::Record { .. }) => {
            let hint = format!("`harvest sandbox rm --force {id}` removes what is left of it");
            Err(conflict("record_damaged", error_chain(&error), hint))
        }
        Err(error) => Err(host_error(format!("cannot inspect {id}"), error)),
    }
}

/// Refuses the sandbox of a session.
fn check_standalone(engine: &Engine, id: &SandboxId, verb: &str) -> Result<(), HostError> {
    if inspect(engine, id)?.spec.owner == Owner::Sessions {
        let hint = "use the session instead: `harvest exec SESSION` runs a command in it, `harvest terminate SESSION` stops it and saves its disk";
        return Err(conflict(
            "of_a_session",
            format!("cannot {verb} {id}: it belongs to a session"),
            hint,
        ));
    }
    Ok(())
}

fn fork(engine: &Engine, id: SandboxId, wanted: ForkSpec) -> Result<ForkedSandbox, HostError> {
    let source = inspect(engine, &id)?.spec;
    let ForkSpec { ids, made_by, snapshot } = wanted;
    let count = ids.len();
    let to_host_error = |doing: String| move |error| host_error(doing, error);
    engine
        .capture(&id, &snapshot)
        .map_err(to_host_error(format!("cannot take a snapshot of {id}")))?;
    let (mut forks, mut failed) = (Vec::new(), None);
    for fork in ids {
        let from = Origin::Snapshot(snapshot.clone());
        // A fork of a session's sandbox is standalone: no gateway serves its door.
        let network =
            if source.network == Network::Door { Network::Nothing } else { source.network };
        let made_by = made_by.clone();
        let spec = Spec {
            id: fork.clone(),
            from,
            network,
            owner: Owner::Standalone,
            made_by,
            ..source.clone()
        };
        match engine.start(&spec) {
            // An earlier attempt of the same request created it.
            Ok(_) | Err(EngineError::Exists { .. }) => forks.push(fork),
            Err(error) if forks.is_empty() => {
                // Best effort: a snapshot that stays is listed, and the first error matters more.
                let _ = engine.snapshot_remove(&snapshot);
                return Err(host_error(format!("cannot fork {id}"), error));
            }
            Err(error) => {
                failed = Some(format!(
                    "started {} of {count} forks: {}",
                    forks.len(),
                    error_chain(&error)
                ));
                break;
            }
        }
    }
    // The forks now hold the layers themselves.
    engine
        .snapshot_remove(&snapshot)
        .map_err(to_host_error(format!("cannot remove snapshot {snapshot}")))?;
    Ok(ForkedSandbox { source: id, forks, failed })
}

/// Saves the old disk as a snapshot first, so that a crash at any step loses nothing.
fn restore(
    engine: &Engine,
    id: SandboxId,
    snapshot: SnapshotId,
) -> Result<RestoredSandbox, HostError> {
    let before = inspect(engine, &id)?;
    if before.spec.owner != Owner::Standalone {
        let hint = "`harvest sandbox restore SNAPSHOT` starts a new sandbox from the snapshot";
        return Err(conflict(
            "not_yours",
            format!("{id} cannot be restored: it is not a standalone sandbox"),
            hint,
        ));
    }
    let to_host_error = |doing: String| move |error| host_error(doing, error);
    let found =
        engine.snapshot(&snapshot).map_err(to_host_error(format!("cannot read {snapshot}")))?;
    if found.is_none() {
        return Err(host_error(String::new(), EngineError::SnapshotMissing { snapshot }));
    }
    let kept = SnapshotId::random();
    let spec = Spec { from: Origin::Snapshot(snapshot.clone()), ..before.spec };
    let doing = format!("cannot save the disk of {id}; nothing was restored");
    engine.stop_and_save(&id, &kept).map_err(to_host_error(doing))?;
    let doing = format!("cannot restore {id} to {snapshot}; its previous disk is saved as {kept}");
    let started = engine.start(&spec).and_then(|_| engine.snapshots_sync());
    started.map_err(|error| HostError::Failed {
        doing,
        hint: Some(format!("`harvest sandbox restore {kept}` starts a sandbox from it")),
        source: Box::new(error),
    })?;
    Ok(RestoredSandbox { id, snapshot, kept })
}
