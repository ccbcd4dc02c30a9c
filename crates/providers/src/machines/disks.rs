//! Volumes, snapshots and room on this machine.

use async_trait::async_trait;
use harvest_engine::{
    Backing, DiskRoom as Room, Engine, EngineError, Level, Snapshot, StoreKind, Usage,
    Volume as Made, VolumeSpec,
};
use harvest_proto::{
    SnapshotId,
    api::machines::{
        Collected, CreateVolume, DiskRoom, DiskUsage, Finding, FindingLevel, MachineSnapshot,
        Owned, SandboxUsed, StoreFile, Used, Volume, VolumeBacking,
    },
};
use harvest_session::machines::{HostDisks, MachineError};

use super::{
    LocalMachines, doctor,
    errors::{conflict, explained},
    images::config,
};

// Room for as many files as there are small ones in a cache; the engine refuses fewer than 1 KiB for each.
const BYTES_PER_FILE: u64 = 4096;

#[async_trait]
impl HostDisks for LocalMachines {
    async fn volume_list(&self) -> Result<Vec<Volume>, MachineError> {
        let volumes = self.ask("cannot list volumes", Engine::volumes).await?;
        Ok(volumes.into_iter().map(volume).collect())
    }

    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, MachineError> {
        let name = order.name.parse().map_err(|error: EngineError| {
            MachineError::invalid("invalid_volume", error.to_string())
        })?;
        let default = VolumeSpec::new(name);
        let size_bytes = order.size_bytes.unwrap_or(default.size_bytes);
        let files = order.files.unwrap_or(default.files.min(size_bytes / BYTES_PER_FILE));
        let spec = VolumeSpec { size_bytes, files, ..default };
        let doing = format!("cannot make the volume `{}`", order.name);
        self.ask(doing, move |engine| engine.volume_create(&spec)).await.map(volume)
    }

    async fn volume_delete(&self, name: &str) -> Result<(), MachineError> {
        let (name, doing) = (name.to_owned(), format!("cannot remove the volume `{name}`"));
        self.work(doing.clone(), move |engine| {
            let missing = || {
                let hint = "`harvest volume ls` lists those there are".to_owned();
                let what = format!("there is no volume `{name}`");
                MachineError::Missing { code: "volume_missing", what, hint }
            };
            let parsed = name.parse().map_err(|_| missing())?;
            let said = |error| explained(doing.clone(), error);
            engine.volume(&parsed).map_err(said)?.ok_or_else(missing)?;
            engine.volume_remove(&parsed).map_err(said)
        })
        .await
    }

    async fn snapshot_list(&self) -> Result<Vec<MachineSnapshot>, MachineError> {
        let mut snapshots = self.ask("cannot list snapshots", Engine::snapshots).await?;
        snapshots.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created_at));
        Ok(snapshots.into_iter().map(snapshot).collect())
    }

    async fn snapshot_delete(
        &self,
        snapshot: &SnapshotId,
        force: bool,
    ) -> Result<(), MachineError> {
        let (id, doing) = (snapshot.clone(), format!("cannot forget {snapshot}"));
        self.work(doing.clone(), move |engine| {
            let said = |error| explained(doing.clone(), error);
            let found = engine.snapshot(&id).map_err(said)?;
            let found =
                found.ok_or_else(|| said(EngineError::SnapshotMissing { snapshot: id.clone() }))?;
            if found.of_sessions && !force {
                let hint =
                    "`harvest rm SESSION` and `harvest repo rm` forget theirs; --force insists";
                let what = format!("a session or repository may go on from {id}");
                return Err(conflict("of_a_session", what, hint));
            }
            engine.snapshot_remove(&id).map_err(said)
        })
        .await
    }

    async fn disk_usage(&self) -> Result<DiskUsage, MachineError> {
        // Measuring a layer for the first time may take a second.
        let (usage, volumes) =
            self.ask("cannot measure", |engine| Ok((engine.usage()?, engine.volumes()?))).await?;
        Ok(disk_usage(usage, volumes))
    }

    async fn collect(&self, dry_run: bool) -> Result<Collected, MachineError> {
        let collected = self.ask("cannot collect", move |engine| engine.gc(dry_run)).await?;
        Ok(Collected {
            layers: collected.layers.into_iter().map(String::from).collect(),
            sandboxes: collected.sandboxes,
            bytes: collected.bytes,
            trees: collected.trees,
            cache_busy: collected.cache_busy,
            cache_kept_for: collected.cache_kept_for.map(|home| home.display().to_string()),
        })
    }

    async fn findings(&self) -> Result<Vec<Finding>, MachineError> {
        self.work("cannot look at this host", |engine| Ok(look(engine))).await
    }
}

fn volume(made: Made) -> Volume {
    Volume {
        name: made.name.to_string(),
        backing: match made.backing {
            Backing::Image => VolumeBacking::Image,
            Backing::Folder => VolumeBacking::Folder,
        },
        size_bytes: made.size_bytes,
        files: made.files,
        folders: made.folders,
        created_at: made.created_at,
    }
}

fn snapshot(kept: Snapshot) -> MachineSnapshot {
    MachineSnapshot {
        id: kept.id,
        owner: if kept.of_sessions { Owned::Session } else { Owned::You },
        layers: kept.layers.into_iter().map(String::from).collect(),
        config: config(kept.config),
        created_at: kept.created_at,
        durable: kept.durable,
        sandbox: kept.sandbox,
        parent: kept.parent,
        bytes: kept.bytes,
    }
}

fn disk_usage(usage: Usage, volumes: Vec<Made>) -> DiskUsage {
    let room = |room: Room| DiskRoom { total_bytes: room.total_bytes, free_bytes: room.free_bytes };
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
            .map(|one| Used { name: one.name, bytes: one.bytes })
            .collect(),
        images_bytes: usage.images_bytes,
        snapshots: usage
            .snapshots
            .into_iter()
            .map(|one| Used { name: one.name.to_string(), bytes: one.bytes })
            .collect(),
        snapshots_bytes: usage.snapshots_bytes,
        sandboxes: usage
            .sandboxes
            .into_iter()
            .map(|one| SandboxUsed { id: one.id, running: one.running, bytes: one.bytes })
            .collect(),
        volumes_bytes: volumes.iter().map(|volume| volume.size_bytes).sum(),
        volumes: volumes.into_iter().map(volume).collect(),
        trash_bytes: usage.trash_bytes,
        reclaimable_bytes: usage.reclaimable_bytes,
        store_file: usage
            .store_file
            .map(|file| StoreFile { bytes: file.bytes, free_bytes: file.free_bytes }),
        home_disk: room(usage.home_disk),
        cache_disk: room(usage.cache_disk),
    }
}

/// Everything there is to find on this host, the engine's own first. Tries it, which takes a moment.
#[must_use]
pub fn look(engine: &Engine) -> Vec<Finding> {
    engine.probe().into_iter().map(finding).chain(doctor::programs()).collect()
}

/// A finding of the engine in the words of the API.
fn finding(found: harvest_engine::Finding) -> Finding {
    let level = match found.level {
        Level::Ok => FindingLevel::Ok,
        Level::Warn => FindingLevel::Warn,
        Level::Fail => FindingLevel::Fail,
    };
    Finding { id: found.id.to_owned(), level, found: found.found, fix: found.fix }
}
