//! Garbage collection: removes layers, dead sandboxes and leftovers that no record refers to. A
//! layer that a snapshot, image or sandbox of any home refers to is never removed.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use harvest_proto::SandboxId;

use crate::{
    Engine, EngineError, Owner, SandboxState,
    disk::{Disk, is_removed},
    disk_usage::tree_bytes,
    home::Home,
    image::{Image, PulledImage},
    process::start_ticks,
    records,
    sandbox_record::{self, Record},
    snapshot::KnownSnapshots,
    spec::LayerId,
    store::{self, Driver, Store, StoreKind},
    syscall, trash,
};

/// What a garbage collection removed, or would remove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Layers that nothing refers to.
    pub layers: Vec<LayerId>,
    /// Dead sandboxes whose owner process has exited.
    pub sandboxes: Vec<SandboxId>,
    /// Disk usage of the layers.
    pub bytes: u64,
    /// Trees in the trash, including those just moved there.
    pub trees: u64,
    /// Whether the shared cache was skipped because a build holds it.
    pub cache_busy: bool,
    /// The home because of which the shared cache was skipped: its folder is empty, or it is
    /// missing with its disk.
    pub cache_kept_for: Option<PathBuf>,
    /// Whether `bytes` is left at 0 to save the time of measuring.
    pub(crate) unmeasured: bool,
}

impl Engine {
    /// Removes sandboxes whose owner has exited, layers that no record refers to and leftovers of
    /// crashes, then empties the trash, which may take a while. With `dry_run`, only reports them.
    ///
    /// # Errors
    /// When a record cannot be read: then nothing is known to be unused.
    pub fn gc(&self, dry_run: bool) -> Result<Collected, EngineError> {
        let mut collected = Collected::default();
        for id in self.list()? {
            if self.is_orphaned(&id)? {
                if !dry_run {
                    self.remove(&id)?;
                }
                collected.sandboxes.push(id);
            }
        }
        if !dry_run {
            self.remove_unfinished_volumes()?;
        }
        let trash = self.disk.collect(dry_run, &mut collected)?;
        if !dry_run {
            self.disk.delete(&trash)?;
            self.disk.commit_deletions()?;
        }
        Ok(collected)
    }

    /// A quick [`Engine::gc`] of this home after snapshots and sandboxes were removed: skips the
    /// shared cache and measures nothing. Returns the number of layers removed.
    ///
    /// # Errors
    /// When a record cannot be read: then nothing is known to be unused.
    pub fn gc_home(&self) -> Result<usize, EngineError> {
        self.store.ensure_mounted()?;
        let (trash, layers) = self.disk.collect_home_only()?;
        self.disk.delete(&trash)?;
        self.disk.commit_deletions()?;
        // What was removed and the lists of all records took memory that the allocator keeps.
        syscall::trim_heap();
        Ok(layers)
    }

    /// Whether the session sandboxes and snapshots of this home belong to the database with this
    /// id. The first database that asks becomes the owner.
    ///
    /// # Errors
    /// When the owner's record cannot be read or written.
    pub fn belongs_to(&self, database: &str) -> Result<bool, EngineError> {
        self.store.ensure_mounted()?;
        let path = self.disk.home.path().join("sessions-of.json");
        if let Some(owner) = records::read_record::<String>(&path)? {
            return Ok(owner == database);
        }
        self.disk.record_write(&path, &database)?;
        Ok(true)
    }

    fn is_orphaned(&self, id: &SandboxId) -> Result<bool, EngineError> {
        let Some(record) = Record::read(&self.disk.home, id)? else { return Ok(false) };
        let Owner::Process(pid) = record.owner else { return Ok(false) };
        Ok(start_ticks(pid).is_none() && matches!(self.find(id)?, SandboxState::Dead { .. }))
    }
}

impl Disk {
    /// Moves every unused layer of this home and of the cache to the trash; with `dry_run`, only
    /// reports them. Returns the content of the trash, to be deleted after the locks are released.
    pub(crate) fn collect(
        &self,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<TrashContents, EngineError> {
        let candidates = self.find_candidates()?;
        let _home_lock = self.lock_home_for_gc()?;
        let (mut trash, used) = self.collect_home(candidates, dry_run, collected)?;
        if let Some(_cache_lock) = self.try_lock_cache_for_gc()? {
            self.collect_cache(used, dry_run, collected)?;
            trash.cache = records::names_in(&self.cache_trash())?;
        } else {
            collected.cache_busy = true;
        }
        collected.trees = (trash.home.len() + trash.host.len() + trash.cache.len()) as u64;
        Ok(trash)
    }

    /// [`Disk::collect`] without the cache and without measuring. Returns the number of layers,
    /// too.
    pub(crate) fn collect_home_only(&self) -> Result<(TrashContents, usize), EngineError> {
        let candidates = self.find_candidates()?;
        let _home_lock = self.lock_home_for_gc()?;
        let mut collected = Collected { unmeasured: true, ..Collected::default() };
        let (trash, _) = self.collect_home(candidates, false, &mut collected)?;
        Ok((trash, collected.layers.len()))
    }

    /// Finds the layers that no snapshot uses before the lock is taken: starts and captures wait
    /// for the lock, and must not wait until thousands of records are read.
    fn find_candidates(&self) -> Result<Candidates, EngineError> {
        let mut known = KnownSnapshots::default();
        self.add_snapshots(&mut known)?;
        let layers = unused_layers(&self.home.layers(), &known.layers)?;
        Ok(Candidates { known, layers })
    }

    /// Returns the layers that the home uses, too. A layer that became unused after the candidates
    /// were found is left to the next collection.
    fn collect_home(
        &self,
        candidates: Candidates,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<(TrashContents, BTreeSet<LayerId>), EngineError> {
        let Candidates { known, mut layers } = candidates;
        let used = self.used_by_home(&self.home, known)?;
        layers.retain(|layer| !used.contains(layer));
        self.discard(&self.home.layers(), layers, &self.home.trash(), dry_run, collected)?;
        if !dry_run {
            // The exclusive lock guarantees that no writer is active.
            for name in records::names_in(&self.home.partial())? {
                trash::move_to_trash(&self.home.partial().join(name), &self.home.trash())?;
            }
            self.remove_unfinished_records()?;
        }
        let home = records::names_in(&self.home.trash())?;
        let mut trash = TrashContents { home, ..TrashContents::default() };
        if self.home.host_trash() != self.home.trash() {
            trash.host = records::names_in(&self.home.host_trash())?;
        }
        Ok((trash, used))
    }

    fn collect_cache(
        &self,
        mut used: BTreeSet<LayerId>,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<(), EngineError> {
        for (record, home) in records::read_records::<PathBuf>(&self.homes())? {
            if home == self.home.path() {
                // Its layers are in `used` already.
                continue;
            }
            if store::is_home(&home)? {
                // The records may be in a store that is not mounted.
                let store = Store::open(&home, Driver::Dir)?;
                let home = Home::new(home, store.kind());
                used.extend(self.used_by_home(&home, KnownSnapshots::default())?);
                store.unmount_if_unused()?;
            } else if is_removed(&record, &home) {
                records::remove_file(&record)?;
            } else {
                collected.cache_kept_for = Some(home);
                return Ok(());
            }
        }
        for Image { layers, .. } in self.image_list()? {
            used.extend(layers);
        }
        let unused = unused_layers(&self.cache_layers(), &used)?;
        self.discard(&self.cache_layers(), unused, &self.cache_trash(), dry_run, collected)?;
        if !dry_run {
            let building = records::names_in(&self.building())?;
            let paths = building.iter().map(|name| self.building().join(name));
            for path in paths.filter(|path| path.is_dir()) {
                trash::move_to_trash(&path, &self.cache_trash())?;
            }
            self.remove_stale_build_records()?;
        }
        Ok(())
    }

    // Removes records of build steps and pulls whose layers are gone.
    fn remove_stale_build_records(&self) -> Result<(), EngineError> {
        for (path, layer) in records::read_records::<LayerId>(&self.steps())? {
            if !self.cache_layers().join(layer.as_str()).exists() {
                records::remove_file(&path)?;
            }
        }
        for (path, pulled) in records::read_records::<PulledImage>(&self.pulled())? {
            if pulled.layers.iter().any(|layer| self.layer_path(layer).is_err()) {
                records::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// The layers that snapshots and sandboxes of a home use.
    fn used_by_home(
        &self,
        home: &Home,
        mut known: KnownSnapshots,
    ) -> Result<BTreeSet<LayerId>, EngineError> {
        let other = self.with_home(home.clone());
        other.add_snapshots(&mut known)?;
        let mut used = known.layers;
        other.add_used_by_sandboxes(&mut used)?;
        Ok(used)
    }

    fn add_used_by_sandboxes(&self, used: &mut BTreeSet<LayerId>) -> Result<(), EngineError> {
        for id in sandbox_record::list_ids(&self.home)? {
            if let Some(record) = Record::read(&self.home, &id)? {
                used.extend(record.layers);
            }
            used.extend(self.captures(&id)?.chain);
            used.extend(self.pending_save(&id)?.map(|pending| pending.layer));
        }
        Ok(())
    }

    fn discard(
        &self,
        folder: &Path,
        layers: Vec<LayerId>,
        trash_folder: &Path,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<(), EngineError> {
        for layer in layers {
            let path = folder.join(layer.as_str());
            // A tree that cannot be measured is removed all the same.
            if !collected.unmeasured {
                collected.bytes += tree_bytes(&path).unwrap_or(0);
            }
            if !dry_run {
                trash::move_to_trash(&path, trash_folder)?;
                records::remove_file(&self.sizes().join(format!("{layer}.json")))?;
            }
            collected.layers.push(layer);
        }
        Ok(())
    }

    /// The layers that a collection would remove now, if snapshots use `used`. Takes no lock, so
    /// the result is an estimate. Leaves out the cache while the records of a home that uses it are
    /// not readable.
    pub(crate) fn find_unused(
        &self,
        mut used: BTreeSet<LayerId>,
    ) -> Result<Vec<LayerId>, EngineError> {
        self.add_used_by_sandboxes(&mut used)?;
        let cache = self.add_used_by_cache(&mut used)?;
        let mut unused = unused_layers(&self.home.layers(), &used)?;
        if cache {
            unused.extend(unused_layers(&self.cache_layers(), &used)?);
        }
        Ok(unused)
    }

    /// Adds the layers that images and other homes use. Returns false when the records of a home
    /// are not readable.
    fn add_used_by_cache(&self, used: &mut BTreeSet<LayerId>) -> Result<bool, EngineError> {
        for image in self.image_list()? {
            used.extend(image.layers);
        }
        for (record, home) in records::read_records::<PathBuf>(&self.homes())? {
            if home == self.home.path() {
                continue;
            }
            let kind = store::read_kind(&home)?.unwrap_or(StoreKind::Dir);
            if store::root(&home, kind).join("snapshots").is_dir() {
                let home = Home::new(home, kind);
                used.extend(self.used_by_home(&home, KnownSnapshots::default())?);
            } else if !is_removed(&record, &home) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Deletes these trees of the trash. Trees that were added later may still be in use.
    pub(crate) fn delete(&self, trash: &TrashContents) -> Result<(), EngineError> {
        trash::delete(&self.home.trash(), &trash.home)?;
        trash::delete(&self.home.host_trash(), &trash.host)?;
        trash::delete(&self.cache_trash(), &trash.cache)
    }
}

/// The layers of a folder that are not among the used ones.
fn unused_layers(folder: &Path, used: &BTreeSet<LayerId>) -> Result<Vec<LayerId>, EngineError> {
    let names = records::names_in(folder)?;
    let layers = names.iter().filter_map(|name| name.parse::<LayerId>().ok());
    Ok(layers.filter(|layer| !used.contains(layer)).collect())
}

/// What a collection found before it took the lock.
struct Candidates {
    known: KnownSnapshots,
    /// Layers of the home that none of the known snapshots uses.
    layers: Vec<LayerId>,
}

/// The names of the trees in each trash folder.
#[derive(Debug, Default)]
pub(crate) struct TrashContents {
    home: Vec<String>,
    host: Vec<String>,
    cache: Vec<String>,
}

#[cfg(test)]
mod tests;
