//! Volumes and disk usage of this machine.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_engine::{
    Backing, DiskUsage as EngineUsage, Engine, EngineError, ParseVolumeNameError, StoreKind,
    Volume as EngineVolume, VolumeName, VolumeSpec,
};
use harvest_proto::{
    RepositoryName,
    api::{
        CreateVolume, DiskUsage, Finding, GarbageReport, NamedSize, SandboxDiskUsage, Volume,
        VolumeBacking,
    },
};
use harvest_session::sandboxes::{Host, MissingObject, SandboxError, StandbyCounts};

use super::{Local, doctor, errors::sandbox_error};

// The default inode ratio, for caches of small files; the engine refuses less than 1 KiB per file.
const BYTES_PER_FILE: u64 = 4096;

#[async_trait]
impl Host for Local {
    async fn volume_list(&self) -> Result<Vec<Volume>, SandboxError> {
        self.engine("cannot list volumes", volumes).await
    }

    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, SandboxError> {
        let name = order.name.parse().map_err(|error: ParseVolumeNameError| {
            SandboxError::invalid("invalid_volume", error.to_string())
        })?;
        let default = VolumeSpec::new(name);
        let size_bytes = order.size_bytes.unwrap_or(default.size_bytes);
        let files = order.files.unwrap_or(default.files.min(size_bytes / BYTES_PER_FILE));
        let spec = VolumeSpec { size_bytes, files, ..default };
        let doing = format!("cannot create volume `{}`", order.name);
        self.engine(doing, move |engine| Ok(api_volume(engine, engine.volume_create(&spec)?))).await
    }

    async fn volume_delete(&self, name: &str) -> Result<(), SandboxError> {
        let (name, doing) = (name.to_owned(), format!("cannot remove volume `{name}`"));
        self.work(doing.clone(), move |engine| {
            let missing = || SandboxError::Missing(MissingObject::Volume(name.clone()));
            let parsed = name.parse().map_err(|_| missing())?;
            let failed = |error| sandbox_error(doing.clone(), error);
            engine.volume(&parsed).map_err(failed)?.ok_or_else(missing)?;
            engine.volume_remove(&parsed).map_err(failed)
        })
        .await
    }

    async fn state_delete(&self, repository: &RepositoryName) -> Result<(), SandboxError> {
        let name = VolumeName::of_repository(repository);
        let doing = format!("cannot remove the state of repository {repository}");
        self.engine(doing, move |engine| engine.volume_remove(&name)).await
    }

    async fn disk_usage(&self) -> Result<DiskUsage, SandboxError> {
        // Measuring a layer for the first time may take a second.
        let (usage, volumes) = self
            .engine("cannot measure disk usage", |engine| {
                Ok((engine.disk_usage()?, volumes(engine)?))
            })
            .await?;
        Ok(disk_usage(usage, volumes))
    }

    async fn collect(&self, dry_run: bool) -> Result<GarbageReport, SandboxError> {
        let collected =
            self.engine("cannot collect garbage", move |engine| engine.gc(dry_run)).await?;
        Ok(GarbageReport {
            layers: collected.layers.into_iter().map(String::from).collect(),
            sandboxes: collected.sandboxes,
            bytes: collected.bytes,
            trees: collected.trees,
            cache_busy: collected.cache_busy,
            cache_kept_for: collected.cache_kept_for.map(|home| home.display().to_string()),
        })
    }

    async fn findings(&self) -> Result<Vec<Finding>, SandboxError> {
        self.work("cannot check this host", |engine| Ok(host_findings(engine))).await
    }

    async fn standby(&self) -> Option<StandbyCounts> {
        // One query at a time: a zygote that does not answer blocks a thread.
        let guard = Arc::clone(&self.counting).try_lock_owned().ok()?;
        let counting = move |engine: &Engine| {
            let _guard = guard;
            engine.standby_counts()
        };
        let counts =
            self.engine("cannot count standby processes", counting).await.ok().flatten()?;
        let harvest_engine::StandbyCounts { ready, preforked, used, missed } = counts;
        Some(StandbyCounts { ready, preforked, used, missed })
    }
}

fn volumes(engine: &Engine) -> Result<Vec<Volume>, EngineError> {
    Ok(engine.volumes()?.into_iter().map(|volume| api_volume(engine, volume)).collect())
}

fn api_volume(engine: &Engine, volume: EngineVolume) -> Volume {
    Volume {
        used_bytes: engine.volume_bytes(&volume),
        name: volume.name.to_string(),
        backing: match volume.backing {
            Backing::Image => VolumeBacking::Image,
            Backing::Folder => VolumeBacking::Folder,
        },
        size_bytes: volume.size_bytes,
        files: volume.files,
        folders: volume.folders,
        owner: volume.owner,
        created_at: volume.created_at,
    }
}

fn disk_usage(usage: EngineUsage, volumes: Vec<Volume>) -> DiskUsage {
    DiskUsage {
        driver: match usage.driver {
            StoreKind::Dir => "dir",
            StoreKind::Btrfs => "btrfs",
            StoreKind::BtrfsFile => "btrfs_file",
        }
        .to_owned(),
        images: usage
            .images
            .into_iter()
            .map(|one| NamedSize { name: one.name, bytes: one.bytes })
            .collect(),
        images_bytes: usage.images_bytes,
        snapshots: usage
            .snapshots
            .into_iter()
            .map(|one| NamedSize { name: one.name.to_string(), bytes: one.bytes })
            .collect(),
        snapshots_bytes: usage.snapshots_bytes,
        sandboxes: usage
            .sandboxes
            .into_iter()
            .map(|one| SandboxDiskUsage { id: one.id, running: one.running, bytes: one.bytes })
            .collect(),
        volumes_bytes: volumes.iter().map(|volume| volume.used_bytes).sum(),
        volumes,
        forge_bytes: usage.forge_bytes,
        trash_bytes: usage.trash_bytes,
        reclaimable_bytes: usage.reclaimable_bytes,
        store_file: usage.store_file,
        home_disk: usage.home_disk,
        cache_disk: usage.cache_disk,
    }
}

/// All findings about this host, the engine's first. The checks take a moment.
#[must_use]
pub fn host_findings(engine: &Engine) -> Vec<Finding> {
    engine.probe().into_iter().chain(doctor::program_findings()).collect()
}
