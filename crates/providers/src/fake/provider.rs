//! The fake as a sandbox provider.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use harvest_proto::{
    AgentName, SandboxId, SnapshotId, Timestamp,
    api::{Sandbox, SandboxList, SandboxStatus, VolumeMount},
    event::SnapshotKind,
};
use harvest_session::{
    DoorListener, DoorStream,
    sandboxes::{
        BridgeStream, ComputeUsage, Created, Found, FreezeControl, Host, ListedSandbox,
        MissingObject, SandboxError, SandboxProvider, SandboxSpec, Snapshots, StartFrom,
    },
};

use super::{Fake, FakeOp, POWER_CUT, connection, sandbox::FakeSandbox};

const STATE_VOLUME: &str = "state";

/// The door of a fake sandbox, which never opens a connection.
struct ClosedDoor;

#[async_trait]
impl DoorListener for ClosedDoor {
    async fn accept(&mut self) -> std::io::Result<Box<dyn DoorStream>> {
        std::future::pending().await
    }
}

#[async_trait]
impl SandboxProvider for Fake {
    fn name(&self) -> &'static str {
        self.name
    }

    async fn create(&self, spec: SandboxSpec) -> Result<Created, SandboxError> {
        self.check(FakeOp::Create)?;
        let mut held = self.inner().creates_held.subscribe();
        let _ = held.wait_for(|held| !*held).await;
        let mut inner = self.inner();
        if inner.sandboxes.contains_key(&spec.id) {
            let what = format!("{} already exists", spec.id);
            return Err(SandboxError::conflict("exists", what, "choose another id"));
        }
        // The copy of a sandbox names the state volume, which every machine has.
        let exists = |name: &str| name == STATE_VOLUME || inner.host.has_volume(name);
        if let Some(mount) = spec.volumes.iter().find(|mount| !exists(&mount.name)) {
            return Err(SandboxError::Missing(MissingObject::Volume(mount.name.clone())));
        }
        let files = match &spec.from {
            StartFrom::Image(image)
                if inner.missing_images.contains(image) || inner.broken_images.contains(image) =>
            {
                return Err(SandboxError::Missing(MissingObject::Image(image.clone())));
            }
            StartFrom::Image(_) => inner.image_files.clone(),
            StartFrom::Snapshot(snapshot) => match inner.snapshots.get(snapshot) {
                Some((files, _)) => files.clone(),
                None => return Err(SandboxError::no_snapshot(snapshot)),
            },
        };
        let fake_sandbox = FakeSandbox::new(files, Arc::clone(&inner.prompts_run), inner.boot);
        fake_sandbox.use_cpu(inner.boot_cpu_micros);
        inner.sandboxes.insert(spec.id.clone(), (spec.clone(), Arc::new(fake_sandbox)));
        inner.created.push(spec);
        Ok(Created { warnings: inner.warnings.clone() })
    }

    async fn find(&self, sandbox: &SandboxId) -> Result<Found, SandboxError> {
        Ok(match self.sandbox(sandbox) {
            Err(_) => Found::Gone,
            Ok(fake_sandbox) => match fake_sandbox.ended() {
                Some(reason) => Found::Dead { reason },
                None => Found::Running,
            },
        })
    }

    async fn get(&self, sandbox: &SandboxId) -> Result<Sandbox, SandboxError> {
        let inner = self.inner();
        let found = inner.sandboxes.get(sandbox);
        let (spec, fake_sandbox) = found.ok_or_else(|| SandboxError::no_sandbox(sandbox))?;
        let place = inner.created.iter().position(|created| created.id == *sandbox);
        Ok(describe(spec, fake_sandbox, place.unwrap_or_default()))
    }

    async fn get_all(&self) -> Result<SandboxList, SandboxError> {
        let ids: Vec<SandboxId> = self.inner().sandboxes.keys().cloned().collect();
        let mut items = Vec::new();
        for id in &ids {
            items.extend(self.get(id).await.ok());
        }
        items.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
        Ok(SandboxList { items, damaged: Vec::new() })
    }

    async fn list(&self) -> Result<Vec<ListedSandbox>, SandboxError> {
        self.check(FakeOp::List)?;
        let inner = self.inner();
        let listed = inner.sandboxes.values().map(|(spec, _)| ListedSandbox {
            id: spec.id.clone(),
            owner: spec.owner,
            made_by: spec.made_by.clone(),
        });
        Ok(listed.collect())
    }

    async fn connect(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, SandboxError> {
        self.check(FakeOp::Connect)?;
        let fake_sandbox = self.sandbox(sandbox)?;
        if fake_sandbox.ended().is_some() {
            return Err(SandboxError::NotRunning { sandbox: sandbox.clone() });
        }
        let (ours, theirs) = tokio::io::duplex(256 * 1024);
        tokio::spawn(connection::serve(fake_sandbox, theirs));
        Ok(Box::new(ours))
    }

    async fn listen(&self, sandbox: &SandboxId) -> Result<Box<dyn DoorListener>, SandboxError> {
        self.sandbox(sandbox)?;
        Ok(Box::new(ClosedDoor))
    }

    async fn wait(&self, sandbox: &SandboxId) -> Result<String, SandboxError> {
        let fake_sandbox = self.sandbox(sandbox)?;
        Ok(fake_sandbox.wait().await)
    }

    async fn stop(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.sandbox(sandbox)?.die("killed");
        Ok(())
    }

    async fn restart(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        let mut inner = self.inner();
        let (prompts_run, boot) = (Arc::clone(&inner.prompts_run), inner.boot);
        let found = inner.sandboxes.get_mut(sandbox);
        let (_, fake_sandbox) = found.ok_or_else(|| SandboxError::no_sandbox(sandbox))?;
        if fake_sandbox.ended().is_some() {
            *fake_sandbox = Arc::new(FakeSandbox::new(fake_sandbox.files(), prompts_run, boot));
        }
        Ok(())
    }

    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), SandboxError> {
        self.check(FakeOp::SnapshotAndRemove)?;
        let mut inner = self.inner();
        let Some((spec, fake_sandbox)) = inner.sandboxes.remove(sandbox) else {
            // Idempotent: an earlier call took this snapshot.
            if inner.snapshots.contains_key(snapshot) {
                return Ok(());
            }
            return Err(SandboxError::no_sandbox(sandbox));
        };
        fake_sandbox.die("removed");
        if fake_sandbox.ended().as_deref() == Some(POWER_CUT) {
            inner.torn.insert(snapshot.clone());
        }
        let of_session = spec.owner == harvest_proto::api::SandboxOwner::Session;
        let saved = (fake_sandbox.files(), of_session.then_some(kind));
        inner.snapshots.insert(snapshot.clone(), saved);
        Ok(())
    }

    async fn remove(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.check(FakeOp::Remove)?;
        if let Some((_, fake_sandbox)) = self.inner().sandboxes.remove(sandbox) {
            fake_sandbox.die("removed");
        }
        Ok(())
    }

    async fn agents(
        &self,
        from: &StartFrom,
    ) -> Result<Option<BTreeMap<String, String>>, SandboxError> {
        let inner = self.inner();
        let exists = match from {
            StartFrom::Image(image) => !inner.missing_images.contains(image),
            StartFrom::Snapshot(snapshot) => inner.snapshots.contains_key(snapshot),
        };
        let stated = |name: &&str| !inner.missing_agents.contains(*name);
        let stated = AgentName::WORDS.into_iter().filter(stated);
        Ok(exists.then(|| stated.map(|name| (name.to_owned(), "1".to_owned())).collect()))
    }

    async fn usage(&self, sandbox: &SandboxId) -> Result<Option<ComputeUsage>, SandboxError> {
        Ok(self.sandbox(sandbox).ok().map(|fake_sandbox| fake_sandbox.usage()))
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

fn describe(spec: &SandboxSpec, fake_sandbox: &FakeSandbox, place: usize) -> Sandbox {
    let reason = fake_sandbox.ended();
    Sandbox {
        id: spec.id.clone(),
        state: if reason.is_some() { SandboxStatus::Dead } else { SandboxStatus::Running },
        reason,
        pid: None,
        image: match &spec.from {
            StartFrom::Image(name) => Some(name.clone()),
            StartFrom::Snapshot(_) => None,
        },
        owner: spec.owner,
        made_by: spec.made_by.clone(),
        network: spec.network,
        door: spec.door.clone(),
        limits: spec.limits,
        volumes: volumes(spec),
        env: spec.env.clone(),
        user: "root".to_owned(),
        workdir: "/".to_owned(),
        layers: vec!["lay_fake".to_owned()],
        created_at: Timestamp::from_millis(i64::try_from(place).unwrap_or(i64::MAX)),
    }
}

/// The volumes of a sandbox, of which `/mnt/state` is one.
fn volumes(spec: &SandboxSpec) -> Vec<VolumeMount> {
    let state = spec.state.as_ref().map(|_| VolumeMount {
        name: STATE_VOLUME.to_owned(),
        inside: "/mnt/state".to_owned(),
        read_only: false,
    });
    spec.volumes.iter().cloned().chain(state).collect()
}

#[async_trait]
impl FreezeControl for Fake {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), SandboxError> {
        self.check(FakeOp::Freeze)?;
        self.set_frozen(sandbox, true)?;
        let fake_sandbox = self.sandbox(sandbox)?;
        let freezes = fake_sandbox.freezes();
        tokio::spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(hold) => {}
                _ = fake_sandbox.wait() => return,
            }
            if fake_sandbox.freezes() == freezes {
                fake_sandbox.set_frozen(false);
            }
        });
        Ok(())
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.set_frozen(sandbox, false)
    }

    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        // A snapshot takes no time here.
        self.set_frozen(sandbox, false)
    }
}
