//! Sandboxes of one's own on this machine.

use async_trait::async_trait;
use harvest_engine::{
    EXEC_STATE, Engine, EngineError, Limits, Network, Origin, Owner, Running, SandboxState, Spec,
};
use harvest_proto::{
    SandboxId, SnapshotId,
    api::machines::{
        CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxList, SandboxSnapshot,
        SandboxStatus, TornSandbox,
    },
};
use harvest_session::{
    machines::{Forks, Fresh, MachineError, NewSandbox, Sandboxes},
    provider::{BridgeStream, Provider as _, ProviderError},
};
use tokio::net::UnixStream;

use super::{
    LocalMachines,
    errors::{conflict, explained, no_such_sandbox, not_running, words},
    spec::{shown, spec},
};
use crate::local::{Local, dial, dial_blocking};

const STARTING: &str = "cannot start a sandbox";

#[async_trait]
impl Sandboxes for LocalMachines {
    async fn sandbox_create(&self, new: NewSandbox) -> Result<CreatedSandbox, MachineError> {
        let with_state = new.order.state.unwrap_or(true);
        let spec = spec(new, Owner::Kept)?;
        let begun = self.ask(STARTING, move |engine| begin(engine, spec, with_state));
        Ok(begun.await?.0)
    }

    async fn sandbox_fresh(&self, new: NewSandbox) -> Result<Fresh, MachineError> {
        let with_state = new.order.state.unwrap_or(true);
        let spec = spec(new, Owner::Process(std::process::id()))?;
        let begun = self.work(STARTING, move |engine| {
            let said = |error| explained(STARTING.to_owned(), error);
            let (made, running) = begin(engine, spec, with_state).map_err(said)?;
            // In the same breath: one hop less between asking for a sandbox and its first command.
            dial_blocking(&running.bridge).map(|stream| (made, stream)).map_err(|error| {
                let _ = engine.remove(&running.id);
                MachineError::Failed {
                    doing: STARTING.to_owned(),
                    hint: None,
                    source: error.into(),
                }
            })
        });
        let (made, stream) = begun.await?;
        match UnixStream::from_std(stream) {
            Ok(stream) => Ok(Fresh { made, bridge: Box::new(stream) }),
            Err(error) => {
                self.sandbox_delete(&made.sandbox_id, true).await?;
                Err(MachineError::Failed {
                    doing: STARTING.to_owned(),
                    hint: None,
                    source: error.into(),
                })
            }
        }
    }

    async fn sandbox_list(&self) -> Result<SandboxList, MachineError> {
        self.ask("cannot list sandboxes", list).await
    }

    async fn sandbox_get(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let id = sandbox.clone();
        self.work(format!("cannot look at {sandbox}"), move |engine| get(engine, &id)).await
    }

    async fn sandbox_delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), MachineError> {
        let (id, doing) = (sandbox.clone(), format!("cannot remove {sandbox}"));
        self.work(doing.clone(), move |engine| {
            if !force {
                ones_own(engine, &id, "remove")?;
            } else if matches!(engine.find(&id), Ok(SandboxState::Gone)) {
                return Err(no_such_sandbox(&id));
            }
            engine.remove(&id).map_err(|error| explained(doing, error))
        })
        .await
    }

    async fn sandbox_stop(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let (id, doing) = (sandbox.clone(), format!("cannot stop {sandbox}"));
        self.work(doing.clone(), move |engine| {
            ones_own(engine, &id, "stop")?;
            engine.kill(&id).map_err(|error| explained(doing, error))?;
            get(engine, &id)
        })
        .await
    }

    async fn sandbox_start(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let (id, doing) = (sandbox.clone(), format!("cannot start {sandbox}"));
        self.work(doing.clone(), move |engine| {
            ones_own(engine, &id, "start")?;
            let start = || match engine.find(&id)? {
                SandboxState::Running(_) => Ok(()),
                _ => engine.start_again(&id).map(drop),
            };
            match start() {
                // Somebody else was faster.
                Ok(()) | Err(EngineError::Exists { .. }) => get(engine, &id),
                // So was a server that died after it had asked for it.
                Err(_) if matches!(engine.find(&id), Ok(SandboxState::Running(_))) => {
                    get(engine, &id)
                }
                Err(error) => Err(explained(doing, error)),
            }
        })
        .await
    }

    async fn sandbox_snapshot(
        &self,
        sandbox: &SandboxId,
        kept: SnapshotId,
    ) -> Result<SandboxSnapshot, MachineError> {
        let (id, doing) = (sandbox.clone(), format!("cannot keep the disk of {sandbox}"));
        self.work(doing.clone(), move |engine| {
            there(engine, &id)?;
            // On the disk before it is answered: the process that asks may end, and take the thread with it
            // that would do it later.
            let captured = engine.capture(&id, &kept).and_then(|captured| {
                engine.snapshots_sync()?;
                Ok(captured)
            });
            let captured = captured.map_err(|error| explained(doing, error))?;
            let (frozen_millis, bytes) = (captured.frozen_millis, captured.bytes);
            Ok(SandboxSnapshot { id: kept, sandbox: id, frozen_millis, bytes })
        })
        .await
    }

    async fn sandbox_fork(
        &self,
        sandbox: &SandboxId,
        forks: Forks,
    ) -> Result<ForkedSandbox, MachineError> {
        let id = sandbox.clone();
        self.work(format!("cannot fork {sandbox}"), move |engine| fork(engine, id, forks)).await
    }

    async fn sandbox_restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, MachineError> {
        let (id, to) = (sandbox.clone(), snapshot.clone());
        self.work(format!("cannot put {sandbox} back"), move |engine| restore(engine, id, to)).await
    }

    async fn sandbox_dial(
        &self,
        sandbox: &SandboxId,
    ) -> Result<Box<dyn BridgeStream>, MachineError> {
        let (id, doing) = (sandbox.clone(), format!("cannot reach {sandbox}"));
        let bridge = self.work(doing.clone(), move |engine| {
            // It may stand still, or go when the session rests: a session's commands go through the session.
            ones_own(engine, &id, "run a command in")?;
            match engine.find(&id).map_err(|error| explained(doing, error))? {
                SandboxState::Running(running) => Ok(running.bridge),
                SandboxState::Dead { .. } => Err(not_running(&id)),
                SandboxState::Gone => Err(no_such_sandbox(&id)),
            }
        });
        match dial(&bridge.await?).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(source) => Err(MachineError::Failed {
                doing: format!("cannot dial the supervisor of {sandbox}"),
                hint: None,
                source: source.into(),
            }),
        }
    }

    async fn sandbox_ended(&self, sandbox: &SandboxId) -> Result<(), MachineError> {
        let local = Local::new(self.engine.clone(), Limits::default());
        match local.ended(sandbox).await {
            // Nobody knows it any more, so it does not run.
            Ok(_) | Err(ProviderError::NotRunning { .. }) => Ok(()),
            Err(error) => Err(MachineError::Failed {
                doing: format!("cannot wait for {sandbox}"),
                hint: None,
                source: error.into(),
            }),
        }
    }

    async fn sandbox_why(&self, sandbox: &SandboxId) -> Option<String> {
        let id = sandbox.clone();
        match self.ask("cannot look for it", move |engine| engine.find(&id)).await.ok()? {
            SandboxState::Running(_) => None,
            SandboxState::Dead { reason } => Some(reason),
            SandboxState::Gone => Some("removed".to_owned()),
        }
    }

    async fn sandbox_overdrawn(&self, sandbox: &SandboxId) -> Option<String> {
        let id = sandbox.clone();
        let stopped =
            self.ask("cannot look at its end", move |engine| engine.stopped(&id)).await.ok()??;
        Some(format!("disk: {} bytes may be written", stopped.limit_bytes))
    }
}

/// Starts one; blocks. Without `/mnt/state`, and saying so, where the host has no room or tool for it.
fn begin(
    engine: &Engine,
    mut spec: Spec,
    with_state: bool,
) -> Result<(CreatedSandbox, Running), EngineError> {
    let (asked_for, mut warnings) = (spec.volumes.clone(), Vec::new());
    if spec.network == Network::Host {
        warnings.push("it reaches everything the host does, its loopback included".to_owned());
    }
    let without = |error: &EngineError| format!("without /mnt/state: {}", words(error));
    if with_state {
        match EXEC_STATE.parse().and_then(|name| engine.state(&name)) {
            Ok(state) => spec.volumes.push(state),
            Err(error) => warnings.push(without(&error)),
        }
    }
    let running = match engine.start(&spec) {
        Err(error) if is_of_volumes(&error) && spec.volumes.len() > asked_for.len() => {
            spec.volumes = asked_for;
            // Only when this one starts is it known whose fault it was.
            let running = engine.start(&spec)?;
            warnings.push(without(&error));
            running
        }
        other => other?,
    };
    Ok((CreatedSandbox { sandbox_id: spec.id, status: SandboxStatus::Running, warnings }, running))
}

fn is_of_volumes(error: &EngineError) -> bool {
    use EngineError as Error;
    matches!(error, Error::VolumeTool { .. } | Error::VolumeMissing { .. } | Error::File { .. })
}

fn list(engine: &Engine) -> Result<SandboxList, EngineError> {
    let images = engine.images()?;
    let mut list = SandboxList::default();
    for id in engine.list()? {
        match engine.inspect(&id) {
            // It keeps nobody from the others.
            Err(error @ EngineError::Record { .. }) => {
                list.torn.push(TornSandbox { id, error: words(&error) });
            }
            // Gone between listing and looking: removed by somebody else.
            found => list.items.extend(found?.map(|sandbox| shown(sandbox, &images))),
        }
    }
    list.items.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
    Ok(list)
}

fn get(engine: &Engine, id: &SandboxId) -> Result<Sandbox, MachineError> {
    let found = there(engine, id)?;
    let images =
        engine.images().map_err(|error| explained("cannot list images".to_owned(), error))?;
    Ok(shown(found, &images))
}

fn there(engine: &Engine, id: &SandboxId) -> Result<harvest_engine::Inspected, MachineError> {
    match engine.inspect(id) {
        Ok(Some(found)) => Ok(found),
        Ok(None) => Err(no_such_sandbox(id)),
        Err(error @ EngineError::Record { .. }) => {
            let hint = format!("`harvest sandbox rm --force {id}` throws away what is left of it");
            Err(conflict("record_torn", words(&error), hint))
        }
        Err(error) => Err(explained(format!("cannot look at {id}"), error)),
    }
}

/// What a session works in is the session's.
fn ones_own(engine: &Engine, id: &SandboxId, verb: &str) -> Result<(), MachineError> {
    if there(engine, id)?.spec.owner == Owner::Sessions {
        let hint = "see `harvest ls`; `harvest exec SESSION` runs something in it, `harvest terminate SESSION` ends it and keeps its disk";
        return Err(conflict(
            "of_a_session",
            format!("cannot {verb} {id}: it belongs to a session"),
            hint,
        ));
    }
    Ok(())
}

fn fork(engine: &Engine, id: SandboxId, wanted: Forks) -> Result<ForkedSandbox, MachineError> {
    let source = there(engine, &id)?.spec;
    let Forks { ids, made_by, through: snapshot } = wanted;
    let count = ids.len();
    let said = |doing: String| move |error| explained(doing, error);
    engine.capture(&id, &snapshot).map_err(said(format!("cannot keep the disk of {id}")))?;
    let (mut forks, mut failed) = (Vec::new(), None);
    for fork in ids {
        let from = Origin::Snapshot(snapshot.clone());
        // Whoever forks a session's sandbox has one of their own: nobody serves its door.
        let network =
            if source.network == Network::Door { Network::Nothing } else { source.network };
        let made_by = made_by.clone();
        let spec =
            Spec { id: fork.clone(), from, network, owner: Owner::Kept, made_by, ..source.clone() };
        match engine.start(&spec) {
            // It was made already, for the same request.
            Ok(_) | Err(EngineError::Exists { .. }) => forks.push(fork),
            Err(error) if forks.is_empty() => {
                // What could not be forgotten is listed, and the first failure says more.
                let _ = engine.snapshot_remove(&snapshot);
                return Err(explained(format!("cannot fork {id}"), error));
            }
            Err(error) => {
                failed =
                    Some(format!("started {} of {count} forks: {}", forks.len(), words(&error)));
                break;
            }
        }
    }
    // What the forks stand on is theirs now; a name for it would only pile up.
    engine.snapshot_remove(&snapshot).map_err(said(format!("cannot forget {snapshot}")))?;
    Ok(ForkedSandbox { source: id, forks, failed })
}

/// The old disk is a snapshot before anything of it is let go: a crash at any step loses nothing.
fn restore(
    engine: &Engine,
    id: SandboxId,
    snapshot: SnapshotId,
) -> Result<RestoredSandbox, MachineError> {
    let before = there(engine, &id)?;
    if before.spec.owner != Owner::Kept {
        let hint = "`harvest sandbox restore SNAPSHOT` starts another one from it";
        return Err(conflict("not_yours", format!("{id} is not yours to put back"), hint));
    }
    let said = |doing: String| move |error| explained(doing, error);
    let found = engine.snapshot(&snapshot).map_err(said(format!("cannot read {snapshot}")))?;
    if found.is_none() {
        return Err(explained(String::new(), EngineError::SnapshotMissing { snapshot }));
    }
    let kept = SnapshotId::random();
    let spec = Spec { from: Origin::Snapshot(snapshot.clone()), ..before.spec };
    let doing = format!("cannot keep the disk of {id}; nothing was put back");
    engine.end_kept(&id, &kept).map_err(said(doing))?;
    let doing = format!("cannot put {id} back to {snapshot}; what was on its disk is {kept}");
    let started = engine.start(&spec).and_then(|_| engine.snapshots_sync());
    started.map_err(|error| MachineError::Failed {
        doing,
        hint: Some(format!("`harvest sandbox restore {kept}` starts one from it")),
        source: Box::new(error),
    })?;
    Ok(RestoredSandbox { id, snapshot, kept })
}
