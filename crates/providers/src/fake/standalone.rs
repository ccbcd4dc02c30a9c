//! Standalone sandboxes, images and volumes of the fake provider. Sandboxes of sessions are listed
//! too.

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
};

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use harvest_proto::{
    ImageId, SandboxId, SnapshotId, Timestamp,
    api::{
        CreateImage, CreateSandbox, CreateVolume, CreatedSandbox, DiskSpace, DiskUsage, Finding,
        FindingLevel, ForkedSandbox, GarbageReport, Image, ImageConfig, ImageLine, ImageSource,
        ImageUsage, ImageUsers, NamedSize, RestoredSandbox, Sandbox, SandboxList, SandboxSnapshot,
        SandboxStatus, SnapshotOwner, StoredSnapshot, Volume, VolumeBacking,
    },
    event::SnapshotKind,
};
use harvest_session::{
    provider::{BridgeStream, Provider, ProviderError, Snapshots, StartFrom, StartSpec},
    standalone::{
        Archive, CreatedEphemeral, ForkSpec, HostDisks, HostError, ImageLines, Images, ImportImage,
        NewSandbox, Sandboxes,
    },
};

use super::{Fake, Inner};

/// State that only standalone operations need.
#[derive(Default)]
pub(super) struct StandaloneState {
    sandboxes: BTreeMap<SandboxId, StandaloneRecord>,
    images: BTreeMap<String, ImageId>,
    volumes: BTreeMap<String, u64>,
}

impl StandaloneState {
    pub(super) fn has(&self, sandbox: &SandboxId) -> bool {
        self.sandboxes.contains_key(sandbox)
    }

    /// Sandboxes that stay until deleted, with the users who created them.
    pub(super) fn permanent(&self) -> impl Iterator<Item = (&SandboxId, Option<&String>)> {
        let permanent = self
            .sandboxes
            .iter()
            .filter(|(_, record)| matches!(record.lifetime, Lifetime::Permanent));
        permanent.map(|(id, record)| (id, record.made_by.as_ref()))
    }
}

#[derive(Clone, Copy)]
enum Lifetime {
    Permanent,
    Process,
}

struct StandaloneRecord {
    order: CreateSandbox,
    made_by: Option<String>,
    lifetime: Lifetime,
    number: i64,
}

fn missing(code: &'static str, what: String) -> HostError {
    HostError::Missing { code, what, hint: "the fake only has what tests create".to_owned() }
}

fn conflict(code: &'static str, what: String) -> HostError {
    HostError::Conflict { code, what, hint: "the fake refuses this".to_owned() }
}

fn host_error(error: ProviderError) -> HostError {
    match error {
        ProviderError::ImageMissing { .. } => missing("image_missing", error.to_string()),
        ProviderError::SnapshotMissing { .. } => missing("snapshot_missing", error.to_string()),
        ProviderError::NotRunning { .. } => conflict("not_running", error.to_string()),
        ProviderError::Failed { .. } => HostError::Failed {
            doing: "the fake failed".to_owned(),
            hint: None,
            source: error.into(),
        },
    }
}

impl Fake {
    fn state(&self, inner: &MutexGuard<'_, Inner>, id: &SandboxId) -> Result<Sandbox, HostError> {
        let fake_sandbox = inner.sandboxes.get(id);
        let fake_sandbox = fake_sandbox
            .ok_or_else(|| missing("not_found", format!("there is no sandbox {id}")))?;
        let reason = fake_sandbox.ended();
        let record = inner.standalone.sandboxes.get(id);
        let order = record.map(|record| record.order.clone()).unwrap_or_default();
        Ok(Sandbox {
            id: id.clone(),
            state: if reason.is_some() { SandboxStatus::Dead } else { SandboxStatus::Running },
            reason,
            pid: None,
            image: order.image,
            owner: match record.map(|record| record.lifetime) {
                Some(Lifetime::Permanent) => "you".to_owned(),
                Some(Lifetime::Process) => format!("process {}", std::process::id()),
                None => "session".to_owned(),
            },
            made_by: record.and_then(|record| record.made_by.clone()),
            network: order.network,
            limits: order.limits,
            volumes: order.volumes,
            env: order.env,
            user: "root".to_owned(),
            workdir: "/".to_owned(),
            layers: vec!["lay_fake".to_owned()],
            created_at: Timestamp::from_millis(record.map_or(0, |record| record.number)),
        })
    }

    async fn create(&self, new: NewSandbox, lifetime: Lifetime) -> Result<SandboxId, HostError> {
        let NewSandbox { id: sandbox, made_by, order } = new;
        if self.inner().sandboxes.contains_key(&sandbox) {
            return Err(conflict("exists", format!("{sandbox} already exists")));
        }
        let from = match &order.from {
            Some(snapshot) => StartFrom::Snapshot(snapshot.clone()),
            None => StartFrom::Image(order.image.clone().unwrap_or_else(|| "base".to_owned())),
        };
        if let Some(mount) = order
            .volumes
            .iter()
            .find(|mount| !self.inner().standalone.volumes.contains_key(&mount.name))
        {
            return Err(missing("volume_missing", format!("there is no volume `{}`", mount.name)));
        }
        let start = StartSpec { sandbox: sandbox.clone(), from, state: None };
        self.start(start).await.map_err(host_error)?;
        let mut inner = self.inner();
        let number = i64::try_from(inner.starts.len()).unwrap_or(i64::MAX);
        inner
            .standalone
            .sandboxes
            .insert(sandbox.clone(), StandaloneRecord { order, made_by, lifetime, number });
        Ok(sandbox)
    }

    fn belongs_to_session(&self, id: &SandboxId) -> bool {
        !self.inner().standalone.has(id)
    }
}

#[async_trait]
impl Sandboxes for Fake {
    async fn sandbox_create(&self, new: NewSandbox) -> Result<CreatedSandbox, HostError> {
        let sandbox_id = self.create(new, Lifetime::Permanent).await?;
        Ok(CreatedSandbox { sandbox_id, status: SandboxStatus::Running, warnings: Vec::new() })
    }

    async fn sandbox_create_ephemeral(
        &self,
        new: NewSandbox,
    ) -> Result<CreatedEphemeral, HostError> {
        let sandbox_id = self.create(new, Lifetime::Process).await?;
        let bridge = self.sandbox_dial(&sandbox_id).await?;
        let created =
            CreatedSandbox { sandbox_id, status: SandboxStatus::Running, warnings: Vec::new() };
        Ok(CreatedEphemeral { created, bridge })
    }

    async fn sandbox_list(&self) -> Result<SandboxList, HostError> {
        let inner = self.inner();
        let items: Result<Vec<_>, _> =
            inner.sandboxes.keys().map(|id| self.state(&inner, id)).collect();
        let mut items = items?;
        items.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
        Ok(SandboxList { items, damaged: Vec::new() })
    }

    async fn sandbox_get(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        self.state(&self.inner(), sandbox)
    }

    async fn sandbox_delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), HostError> {
        self.sandbox_get(sandbox).await?;
        if self.belongs_to_session(sandbox) && !force {
            return Err(conflict("of_a_session", format!("{sandbox} belongs to a session")));
        }
        self.inner().standalone.sandboxes.remove(sandbox);
        Provider::remove(self, sandbox).await.map_err(host_error)
    }

    async fn sandbox_stop(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        self.sandbox(sandbox)
            .map_err(|_| missing("not_found", format!("there is no sandbox {sandbox}")))?
            .die("killed");
        self.sandbox_get(sandbox).await
    }

    async fn sandbox_start(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        let found = self.sandbox_get(sandbox).await?;
        if found.state == SandboxStatus::Dead {
            let mut inner = self.inner();
            if let Some(left) =
                inner.sandboxes.get(sandbox).map(|fake_sandbox| fake_sandbox.files())
            {
                let again =
                    super::FakeSandbox::new(left, Arc::clone(&inner.prompts_run), inner.boot);
                inner.sandboxes.insert(sandbox.clone(), Arc::new(again));
            }
        }
        self.sandbox_get(sandbox).await
    }

    async fn sandbox_snapshot(
        &self,
        sandbox: &SandboxId,
        id: SnapshotId,
    ) -> Result<SandboxSnapshot, HostError> {
        self.sandbox_get(sandbox).await?;
        let frozen_millis =
            self.capture(sandbox, &id, SnapshotKind::Turn).await.map_err(host_error)?;
        Ok(SandboxSnapshot { id, sandbox: sandbox.clone(), frozen_millis, bytes: 0 })
    }

    async fn sandbox_fork(
        &self,
        sandbox: &SandboxId,
        wanted: ForkSpec,
    ) -> Result<ForkedSandbox, HostError> {
        let snapshot = self.sandbox_snapshot(sandbox, wanted.snapshot).await?.id;
        let mut forks = Vec::new();
        for id in wanted.ids {
            let order = CreateSandbox { from: Some(snapshot.clone()), ..CreateSandbox::default() };
            let new = NewSandbox { id: id.clone(), made_by: wanted.made_by.clone(), order };
            match self.create(new, Lifetime::Permanent).await {
                Ok(_) | Err(HostError::Conflict { code: "exists", .. }) => forks.push(id),
                Err(error) => return Err(error),
            }
        }
        self.snapshot_remove(&snapshot).await.map_err(host_error)?;
        Ok(ForkedSandbox { source: sandbox.clone(), forks, failed: None })
    }

    async fn sandbox_restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, HostError> {
        self.sandbox_get(sandbox).await?;
        let mut inner = self.inner();
        let files = inner.snapshots.get(snapshot).map(|(files, _)| files.clone());
        let files = files.ok_or_else(|| {
            missing("snapshot_missing", format!("there is no snapshot {snapshot}"))
        })?;
        let fake_sandbox =
            super::FakeSandbox::new(files, Arc::clone(&inner.prompts_run), inner.boot);
        let kept = SnapshotId::random();
        if let Some(old) = inner.sandboxes.insert(sandbox.clone(), Arc::new(fake_sandbox)) {
            old.die("removed");
            inner.snapshots.insert(kept.clone(), (old.files(), SnapshotKind::Pause));
        }
        Ok(RestoredSandbox { id: sandbox.clone(), snapshot: snapshot.clone(), kept })
    }

    async fn sandbox_dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, HostError> {
        self.sandbox_get(sandbox).await?;
        self.dial(sandbox).await.map_err(host_error)
    }

    async fn sandbox_wait(&self, sandbox: &SandboxId) -> Result<(), HostError> {
        match self.wait_for_exit(sandbox).await {
            // An unknown sandbox counts as exited.
            Ok(_) | Err(ProviderError::NotRunning { .. }) => Ok(()),
            Err(error) => Err(host_error(error)),
        }
    }

    async fn sandbox_exit_reason(&self, sandbox: &SandboxId) -> Option<String> {
        self.sandbox_get(sandbox)
            .await
            .map_or_else(|_| Some("removed".to_owned()), |found| found.reason)
    }

    async fn sandbox_exceeded_limit(&self, _: &SandboxId) -> Option<String> {
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
        let image = image(
            &name,
            self.inner().standalone.images.entry(name.clone()).or_insert_with(ImageId::random),
        );
        stream::iter([ImageLine::Bytes { done: bytes, total: None }, ImageLine::Made { image }])
            .boxed()
    }
}

#[async_trait]
impl Images for Fake {
    async fn image_list(&self) -> Result<Vec<Image>, HostError> {
        Ok(self.inner().standalone.images.iter().map(|(name, id)| image(name, id)).collect())
    }

    async fn image_get(&self, named: &str) -> Result<Image, HostError> {
        let all = self.image_list().await?.into_iter();
        let mut found = all.filter(|image| image.name == named || image.id.to_string() == named);
        found.next().ok_or_else(|| missing("image_missing", format!("there is no image `{named}`")))
    }

    async fn image_usage(&self, named: &str) -> Result<ImageUsage, HostError> {
        self.image_get(named).await?;
        Ok(ImageUsage { layers: Vec::new(), used_by: ImageUsers::default() })
    }

    async fn image_make(&self, order: CreateImage) -> Result<ImageLines, HostError> {
        match order.from {
            ImageSource::Recipe(name) if name == "missing" => {
                Err(missing("recipe_missing", format!("there is no recipe `{name}`")))
            }
            ImageSource::Recipe(name) => Ok(self.make(name, 0)),
            other => Ok(self.make(order.name.unwrap_or_else(|| format!("{other:?}")), 0)),
        }
    }

    async fn image_import(
        &self,
        order: ImportImage,
        mut archive: Archive,
    ) -> Result<ImageLines, HostError> {
        let mut bytes = 0;
        while let Some(Ok(piece)) = archive.next().await {
            bytes += piece.len() as u64;
        }
        Ok(self.make(order.name, bytes))
    }

    async fn image_delete(&self, named: &str) -> Result<(), HostError> {
        let name = self.image_get(named).await?.name;
        self.inner().standalone.images.remove(&name);
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
    async fn volume_list(&self) -> Result<Vec<Volume>, HostError> {
        Ok(self.inner().standalone.volumes.iter().map(|(name, size)| volume(name, *size)).collect())
    }

    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, HostError> {
        let mut inner = self.inner();
        if inner.standalone.volumes.contains_key(&order.name) {
            return Err(conflict("exists", format!("volume `{}` exists already", order.name)));
        }
        let size = order.size_bytes.unwrap_or(1);
        inner.standalone.volumes.insert(order.name.clone(), size);
        Ok(volume(&order.name, size))
    }

    async fn volume_delete(&self, name: &str) -> Result<(), HostError> {
        let removed = self.inner().standalone.volumes.remove(name);
        removed
            .map(drop)
            .ok_or_else(|| missing("volume_missing", format!("there is no volume `{name}`")))
    }

    async fn snapshot_list(&self) -> Result<Vec<StoredSnapshot>, HostError> {
        let of = |id: &SnapshotId| StoredSnapshot {
            id: id.clone(),
            owner: SnapshotOwner::You,
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

    async fn snapshot_delete(&self, snapshot: &SnapshotId, _: bool) -> Result<(), HostError> {
        let removed = self.inner().snapshots.remove(snapshot);
        removed
            .map(drop)
            .ok_or_else(|| missing("snapshot_missing", format!("there is no snapshot {snapshot}")))
    }

    async fn disk_usage(&self) -> Result<DiskUsage, HostError> {
        let space = DiskSpace { total_bytes: 2, free_bytes: 1 };
        let volumes = self.volume_list().await?;
        let images = self.image_list().await?;
        Ok(DiskUsage {
            driver: "dir".to_owned(),
            images: images
                .into_iter()
                .map(|one| NamedSize { name: one.name, bytes: one.bytes })
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
            home_disk: space,
            cache_disk: space,
        })
    }

    async fn collect(&self, _: bool) -> Result<GarbageReport, HostError> {
        Ok(GarbageReport::default())
    }

    async fn findings(&self) -> Result<Vec<Finding>, HostError> {
        let found = "always ready".to_owned();
        Ok(vec![Finding { id: "fake".to_owned(), level: FindingLevel::Ok, found, fix: None }])
    }
}
