//! Machines of one's own, without a machine: for tests of everything above them. Sandboxes here are those of
//! the provider, so a session's are listed as well.

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
};

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use harvest_proto::{
    ImageId, SandboxId, SnapshotId, Timestamp,
    api::machines::{
        Collected, CreateSandbox, CreateVolume, CreatedSandbox, DiskRoom, DiskUsage, Finding,
        FindingLevel, ForkedSandbox, Image, ImageConfig, ImageLine, ImageOrigin, ImageUsage,
        ImageUsers, MachineSnapshot, MakeImage, Owned, RestoredSandbox, Sandbox, SandboxList,
        SandboxSnapshot, SandboxStatus, Used, Volume, VolumeBacking,
    },
    event::SnapshotKind,
};
use harvest_session::{
    machines::{
        Archive, Forks, Fresh, HostDisks, ImageLines, Images, ImportImage, MachineError,
        NewSandbox, Sandboxes,
    },
    provider::{BridgeStream, Provider, ProviderError, Snapshots, StartFrom, StartOrder},
};

use super::{Fake, Inner};

/// What the provider's part does not know.
#[derive(Default)]
pub(super) struct Own {
    sandboxes: BTreeMap<SandboxId, Made>,
    images: BTreeMap<String, ImageId>,
    volumes: BTreeMap<String, u64>,
}

impl Own {
    pub(super) fn has(&self, sandbox: &SandboxId) -> bool {
        self.sandboxes.contains_key(sandbox)
    }

    /// Those that stay, with who made them.
    pub(super) fn kept(&self) -> impl Iterator<Item = (&SandboxId, Option<&String>)> {
        let kept = self.sandboxes.iter().filter(|(_, made)| matches!(made.lives, Lives::OnItsOwn));
        kept.map(|(id, made)| (id, made.made_by.as_ref()))
    }
}

#[derive(Clone, Copy)]
enum Lives {
    OnItsOwn,
    WithUs,
}

struct Made {
    order: CreateSandbox,
    made_by: Option<String>,
    lives: Lives,
    number: i64,
}

fn missing(code: &'static str, what: String) -> MachineError {
    MachineError::Missing { code, what, hint: "the fake has what it was given".to_owned() }
}

fn conflict(code: &'static str, what: String) -> MachineError {
    MachineError::Conflict { code, what, hint: "the fake says no".to_owned() }
}

fn translate(error: ProviderError) -> MachineError {
    match error {
        ProviderError::ImageMissing { .. } => missing("image_missing", error.to_string()),
        ProviderError::SnapshotMissing { .. } => missing("snapshot_missing", error.to_string()),
        ProviderError::NotRunning { .. } => conflict("not_running", error.to_string()),
        ProviderError::Machine { .. } => MachineError::Failed {
            doing: "the fake failed".to_owned(),
            hint: None,
            source: error.into(),
        },
    }
}

impl Fake {
    fn state(
        &self,
        inner: &MutexGuard<'_, Inner>,
        id: &SandboxId,
    ) -> Result<Sandbox, MachineError> {
        let machine = inner.sandboxes.get(id);
        let machine =
            machine.ok_or_else(|| missing("not_found", format!("there is no sandbox {id}")))?;
        let reason = machine.ended();
        let made = inner.own.sandboxes.get(id);
        let order = made.map(|made| made.order.clone()).unwrap_or_default();
        Ok(Sandbox {
            id: id.clone(),
            state: if reason.is_some() { SandboxStatus::Dead } else { SandboxStatus::Running },
            reason,
            pid: None,
            image: order.image,
            owner: match made.map(|made| made.lives) {
                Some(Lives::OnItsOwn) => "you".to_owned(),
                Some(Lives::WithUs) => format!("process {}", std::process::id()),
                None => "session".to_owned(),
            },
            made_by: made.and_then(|made| made.made_by.clone()),
            network: order.network,
            limits: order.limits,
            volumes: order.volumes,
            env: order.env,
            user: "root".to_owned(),
            workdir: "/".to_owned(),
            layers: vec!["lay_fake".to_owned()],
            created_at: Timestamp::from_millis(made.map_or(0, |made| made.number)),
        })
    }

    async fn begin(&self, new: NewSandbox, lives: Lives) -> Result<SandboxId, MachineError> {
        let NewSandbox { id: sandbox, made_by, order } = new;
        if self.inner().sandboxes.contains_key(&sandbox) {
            return Err(conflict("exists", format!("{sandbox} is there already")));
        }
        let from = match &order.from {
            Some(snapshot) => StartFrom::Snapshot(snapshot.clone()),
            None => StartFrom::Image(order.image.clone().unwrap_or_else(|| "base".to_owned())),
        };
        if let Some(mount) =
            order.volumes.iter().find(|mount| !self.inner().own.volumes.contains_key(&mount.name))
        {
            return Err(missing("volume_missing", format!("there is no volume `{}`", mount.name)));
        }
        let start = StartOrder { sandbox: sandbox.clone(), from, state: None };
        self.start(start).await.map_err(translate)?;
        let mut inner = self.inner();
        let number = i64::try_from(inner.orders.len()).unwrap_or(i64::MAX);
        inner.own.sandboxes.insert(sandbox.clone(), Made { order, made_by, lives, number });
        Ok(sandbox)
    }

    fn is_a_sessions(&self, id: &SandboxId) -> bool {
        !self.inner().own.has(id)
    }
}

#[async_trait]
impl Sandboxes for Fake {
    async fn sandbox_create(&self, new: NewSandbox) -> Result<CreatedSandbox, MachineError> {
        let sandbox_id = self.begin(new, Lives::OnItsOwn).await?;
        Ok(CreatedSandbox { sandbox_id, status: SandboxStatus::Running, warnings: Vec::new() })
    }

    async fn sandbox_fresh(&self, new: NewSandbox) -> Result<Fresh, MachineError> {
        let sandbox_id = self.begin(new, Lives::WithUs).await?;
        let bridge = self.sandbox_dial(&sandbox_id).await?;
        let made =
            CreatedSandbox { sandbox_id, status: SandboxStatus::Running, warnings: Vec::new() };
        Ok(Fresh { made, bridge })
    }

    async fn sandbox_list(&self) -> Result<SandboxList, MachineError> {
        let inner = self.inner();
        let items: Result<Vec<_>, _> =
            inner.sandboxes.keys().map(|id| self.state(&inner, id)).collect();
        let mut items = items?;
        items.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
        Ok(SandboxList { items, torn: Vec::new() })
    }

    async fn sandbox_get(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        self.state(&self.inner(), sandbox)
    }

    async fn sandbox_delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), MachineError> {
        self.sandbox_get(sandbox).await?;
        if self.is_a_sessions(sandbox) && !force {
            return Err(conflict("of_a_session", format!("{sandbox} belongs to a session")));
        }
        self.inner().own.sandboxes.remove(sandbox);
        self.end(sandbox).await.map_err(translate)
    }

    async fn sandbox_stop(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        self.machine(sandbox)
            .map_err(|_| missing("not_found", format!("there is no sandbox {sandbox}")))?
            .die("killed");
        self.sandbox_get(sandbox).await
    }

    async fn sandbox_start(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let found = self.sandbox_get(sandbox).await?;
        if found.state == SandboxStatus::Dead {
            let mut inner = self.inner();
            if let Some(left) = inner.sandboxes.get(sandbox).map(|machine| machine.files()) {
                let again = super::Machine::new(left, Arc::clone(&inner.runs), inner.boots);
                inner.sandboxes.insert(sandbox.clone(), Arc::new(again));
            }
        }
        self.sandbox_get(sandbox).await
    }

    async fn sandbox_snapshot(
        &self,
        sandbox: &SandboxId,
        id: SnapshotId,
    ) -> Result<SandboxSnapshot, MachineError> {
        self.sandbox_get(sandbox).await?;
        let frozen_millis =
            self.capture(sandbox, &id, SnapshotKind::Turn).await.map_err(translate)?;
        Ok(SandboxSnapshot { id, sandbox: sandbox.clone(), frozen_millis, bytes: 0 })
    }

    async fn sandbox_fork(
        &self,
        sandbox: &SandboxId,
        wanted: Forks,
    ) -> Result<ForkedSandbox, MachineError> {
        let snapshot = self.sandbox_snapshot(sandbox, wanted.through).await?.id;
        let mut forks = Vec::new();
        for id in wanted.ids {
            let order = CreateSandbox { from: Some(snapshot.clone()), ..CreateSandbox::default() };
            let new = NewSandbox { id: id.clone(), made_by: wanted.made_by.clone(), order };
            match self.begin(new, Lives::OnItsOwn).await {
                Ok(_) | Err(MachineError::Conflict { code: "exists", .. }) => forks.push(id),
                Err(error) => return Err(error),
            }
        }
        self.remove(&snapshot).await.map_err(translate)?;
        Ok(ForkedSandbox { source: sandbox.clone(), forks, failed: None })
    }

    async fn sandbox_restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, MachineError> {
        self.sandbox_get(sandbox).await?;
        let mut inner = self.inner();
        let files = inner.snapshots.get(snapshot).map(|(files, _)| files.clone());
        let files = files.ok_or_else(|| {
            missing("snapshot_missing", format!("there is no snapshot {snapshot}"))
        })?;
        let machine = super::Machine::new(files, Arc::clone(&inner.runs), inner.boots);
        let kept = SnapshotId::random();
        if let Some(old) = inner.sandboxes.insert(sandbox.clone(), Arc::new(machine)) {
            old.die("ended");
            inner.snapshots.insert(kept.clone(), (old.files(), SnapshotKind::Pause));
        }
        Ok(RestoredSandbox { id: sandbox.clone(), snapshot: snapshot.clone(), kept })
    }

    async fn sandbox_dial(
        &self,
        sandbox: &SandboxId,
    ) -> Result<Box<dyn BridgeStream>, MachineError> {
        self.sandbox_get(sandbox).await?;
        self.dial(sandbox).await.map_err(translate)
    }

    async fn sandbox_ended(&self, sandbox: &SandboxId) -> Result<(), MachineError> {
        match self.ended(sandbox).await {
            // Who is not there has ended.
            Ok(_) | Err(ProviderError::NotRunning { .. }) => Ok(()),
            Err(error) => Err(translate(error)),
        }
    }

    async fn sandbox_why(&self, sandbox: &SandboxId) -> Option<String> {
        self.sandbox_get(sandbox)
            .await
            .map_or_else(|_| Some("removed".to_owned()), |found| found.reason)
    }

    async fn sandbox_overdrawn(&self, _: &SandboxId) -> Option<String> {
        None
    }
}

fn image(name: &str, id: &ImageId) -> Image {
    Image {
        id: id.clone(),
        name: name.to_owned(),
        layers: vec!["lay_fake".to_owned()],
        config: config(),
        recipe_key: String::new(),
        bytes: 1,
        created_at: Timestamp::from_millis(0),
        source: "nothing".to_owned(),
    }
}

fn config() -> ImageConfig {
    ImageConfig { env: BTreeMap::new(), user: "root".to_owned(), workdir: "/".to_owned() }
}

impl Fake {
    fn make(&self, name: String, bytes: u64) -> ImageLines {
        let made = image(
            &name,
            self.inner().own.images.entry(name.clone()).or_insert_with(ImageId::random),
        );
        stream::iter([
            ImageLine::Bytes { done: bytes, total: None },
            ImageLine::Made { image: made },
        ])
        .boxed()
    }
}

#[async_trait]
impl Images for Fake {
    async fn image_list(&self) -> Result<Vec<Image>, MachineError> {
        Ok(self.inner().own.images.iter().map(|(name, id)| image(name, id)).collect())
    }

    async fn image_get(&self, named: &str) -> Result<Image, MachineError> {
        let all = self.image_list().await?.into_iter();
        let mut found = all.filter(|image| image.name == named || image.id.to_string() == named);
        found.next().ok_or_else(|| missing("image_missing", format!("there is no image `{named}`")))
    }

    async fn image_usage(&self, named: &str) -> Result<ImageUsage, MachineError> {
        self.image_get(named).await?;
        Ok(ImageUsage { layers: Vec::new(), used_by: ImageUsers::default() })
    }

    async fn image_make(&self, order: MakeImage) -> Result<ImageLines, MachineError> {
        match order.from {
            ImageOrigin::Recipe(name) if name == "missing" => {
                Err(missing("recipe_missing", format!("there is no recipe `{name}`")))
            }
            ImageOrigin::Recipe(name) => Ok(self.make(name, 0)),
            other => Ok(self.make(order.name.unwrap_or_else(|| format!("{other:?}")), 0)),
        }
    }

    async fn image_import(
        &self,
        order: ImportImage,
        mut archive: Archive,
    ) -> Result<ImageLines, MachineError> {
        let mut bytes = 0;
        while let Some(Ok(piece)) = archive.next().await {
            bytes += piece.len() as u64;
        }
        Ok(self.make(order.name, bytes))
    }

    async fn image_delete(&self, named: &str) -> Result<(), MachineError> {
        let name = self.image_get(named).await?.name;
        self.inner().own.images.remove(&name);
        Ok(())
    }
}

fn volume(name: &str, size_bytes: u64) -> Volume {
    Volume {
        name: name.to_owned(),
        backing: VolumeBacking::Folder,
        size_bytes,
        files: 1,
        folders: Vec::new(),
        created_at: Timestamp::from_millis(0),
    }
}

#[async_trait]
impl HostDisks for Fake {
    async fn volume_list(&self) -> Result<Vec<Volume>, MachineError> {
        Ok(self.inner().own.volumes.iter().map(|(name, size)| volume(name, *size)).collect())
    }

    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, MachineError> {
        let mut inner = self.inner();
        if inner.own.volumes.contains_key(&order.name) {
            return Err(conflict("exists", format!("volume `{}` exists already", order.name)));
        }
        let size = order.size_bytes.unwrap_or(1);
        inner.own.volumes.insert(order.name.clone(), size);
        Ok(volume(&order.name, size))
    }

    async fn volume_delete(&self, name: &str) -> Result<(), MachineError> {
        let removed = self.inner().own.volumes.remove(name);
        removed
            .map(drop)
            .ok_or_else(|| missing("volume_missing", format!("there is no volume `{name}`")))
    }

    async fn snapshot_list(&self) -> Result<Vec<MachineSnapshot>, MachineError> {
        let of = |id: &SnapshotId| MachineSnapshot {
            id: id.clone(),
            owner: Owned::You,
            layers: vec!["lay_fake".to_owned()],
            config: config(),
            created_at: Timestamp::from_millis(0),
            durable: true,
            sandbox: None,
            parent: None,
            bytes: None,
        };
        Ok(self.inner().snapshots.keys().map(of).collect())
    }

    async fn snapshot_delete(&self, snapshot: &SnapshotId, _: bool) -> Result<(), MachineError> {
        let removed = self.inner().snapshots.remove(snapshot);
        removed
            .map(drop)
            .ok_or_else(|| missing("snapshot_missing", format!("there is no snapshot {snapshot}")))
    }

    async fn disk_usage(&self) -> Result<DiskUsage, MachineError> {
        let room = DiskRoom { total_bytes: 2, free_bytes: 1 };
        let volumes = self.volume_list().await?;
        let images = self.image_list().await?;
        Ok(DiskUsage {
            driver: "dir".to_owned(),
            images: images
                .into_iter()
                .map(|one| Used { name: one.name, bytes: one.bytes })
                .collect(),
            images_bytes: 0,
            snapshots: Vec::new(),
            snapshots_bytes: 0,
            sandboxes: Vec::new(),
            volumes_bytes: volumes.iter().map(|volume| volume.size_bytes).sum(),
            volumes,
            trash_bytes: 0,
            reclaimable_bytes: 0,
            store_file: None,
            home_disk: room,
            cache_disk: room,
        })
    }

    async fn collect(&self, _: bool) -> Result<Collected, MachineError> {
        Ok(Collected::default())
    }

    async fn findings(&self) -> Result<Vec<Finding>, MachineError> {
        let found = "there is none".to_owned();
        Ok(vec![Finding { id: "machine".to_owned(), level: FindingLevel::Ok, found, fix: None }])
    }
}
