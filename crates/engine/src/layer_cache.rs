//! The shared cache as makers of images use it: folders that become layers, image records, and what
//! earlier builds and pulls produced. Decides nothing about what goes into a layer.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use harvest_proto::SandboxId;
use rustix::fs::{FlockOperation, Mode};

use crate::{
    Engine, EngineError,
    disk_thresholds::DiskOperation,
    disk_usage::tree_bytes,
    error::AtPath,
    file_lock,
    image::{Image, PulledImage},
    records,
    records::random_name,
    snapshot::{
        delta::{Delta, Pass},
        index::Index,
    },
    spec::LayerId,
    trash, tree,
};

/// The cache of one engine, locked against collection until it is dropped: layers and records that
/// are found or made meanwhile stay.
#[derive(Debug)]
pub struct LayerCache<'a> {
    engine: &'a Engine,
    _hold: File,
}

impl Engine {
    /// Opens the cache for making images.
    ///
    /// # Errors
    /// When the store cannot be mounted or the cache cannot be locked.
    pub fn layer_cache(&self) -> Result<LayerCache<'_>, EngineError> {
        self.store.ensure_mounted()?;
        Ok(LayerCache { engine: self, _hold: self.disk.lock_cache_against_gc()? })
    }
}

impl LayerCache<'_> {
    /// The engine whose cache this is.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        self.engine
    }

    /// Checks that the disk has enough free space to begin a build.
    ///
    /// # Errors
    /// [`EngineError::DiskLow`] when it has not.
    pub fn check_space(&self) -> Result<(), EngineError> {
        self.engine.check_free_space(DiskOperation::Build)
    }

    /// Locks an image's name for the maker of that image. When another process holds the lock,
    /// `waiting` is called once, then this blocks.
    ///
    /// # Errors
    /// When the lock file cannot be opened or locked.
    pub fn lock_image(&self, name: &str, waiting: &mut dyn FnMut()) -> Result<File, EngineError> {
        let path = self.engine.disk.building().join(format!("{name}.lock"));
        if let Some(lock) = file_lock::try_lock(&path)? {
            return Ok(lock);
        }
        waiting();
        file_lock::lock(&path, FlockOperation::LockExclusive)
    }

    /// An image by its name.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn image(&self, name: &str) -> Result<Option<Image>, EngineError> {
        self.engine.disk.image(name)
    }

    /// Writes an image's record and replaces the one of its name.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn write_image(&self, image: &Image) -> Result<(), EngineError> {
        self.engine.disk.image_write(image)
    }

    /// The root folder of a layer.
    ///
    /// # Errors
    /// [`EngineError::LayerMissing`] when there is none.
    pub fn layer_path(&self, layer: &LayerId) -> Result<PathBuf, EngineError> {
        self.engine.disk.layer_path(layer)
    }

    /// Whether a layer is on this host.
    #[must_use]
    pub fn has_layer(&self, layer: &LayerId) -> bool {
        self.layer_path(layer).is_ok()
    }

    /// Disk usage of these layers together.
    ///
    /// # Errors
    /// When a layer is missing or cannot be read.
    pub fn tree_bytes(&self, layers: &[LayerId]) -> Result<u64, EngineError> {
        layers.iter().try_fold(0, |sum, layer| Ok(sum + tree_bytes(&self.layer_path(layer)?)?))
    }

    /// Creates an empty folder to fill and then [`commit`](Self::commit) or
    /// [`discard`](Self::discard). A crash leaves it to the next collection.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub fn create_folder(&self) -> Result<PathBuf, EngineError> {
        let folder = self.engine.disk.building().join(random_name());
        fs::create_dir(&folder).at("create", &folder)?;
        Ok(folder)
    }

    /// Turns a filled folder into a layer. The folder is synced before it is renamed, so a layer
    /// that exists is complete, even after a power cut.
    ///
    /// # Errors
    /// When the folder cannot be synced or renamed.
    pub fn commit(&self, folder: &Path, layer: &LayerId) -> Result<(), EngineError> {
        let root = tree::open_root(folder)?;
        rustix::fs::fchmod(&root, Mode::from_raw_mode(0o755)).at("keep", folder)?;
        rustix::fs::syncfs(&root).at("sync", folder)?;
        let path = self.engine.disk.cache_layers().join(layer.as_str());
        match fs::rename(folder, &path) {
            // Another process made the same layer first; both have the same content.
            Err(_) if path.is_dir() => trash::move_to_trash(folder, &self.trash()),
            other => other.at("keep", &path),
        }
    }

    /// Deletes a folder that does not become a layer, at once: it may be what fills the disk.
    pub fn discard(&self, folder: &Path) {
        let name = random_name();
        // The next collection deletes what cannot be moved or deleted now.
        if fs::rename(folder, self.trash().join(&name)).is_ok() {
            let _ = trash::delete(&self.trash(), &[name]);
        }
    }

    /// A folder on the same file system whose content the next collection deletes.
    #[must_use]
    pub fn trash(&self) -> PathBuf {
        self.engine.disk.cache_trash()
    }

    /// Stops a build's sandbox and moves what it wrote into the empty folder `target`.
    ///
    /// # Errors
    /// When the sandbox cannot be stopped or its files cannot be moved.
    pub fn take_changes(&self, sandbox: &SandboxId, target: &Path) -> Result<(), EngineError> {
        self.engine.kill(sandbox)?;
        let upper = self.engine.disk.home.writable(sandbox).join("upper");
        match fs::rename(&upper, target) {
            // Home and cache are on two file systems.
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                copy_tree(&upper, target)
            }
            other => other.at("keep", &upper),
        }
    }

    /// The layer that a forced rebuild recorded for the step of this key.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn step_layer(&self, key: &str) -> Result<Option<LayerId>, EngineError> {
        records::read_record(&self.step_record(key))
    }

    /// Records the layer of a step that was rebuilt by force.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn set_step_layer(&self, key: &str, layer: &LayerId) -> Result<(), EngineError> {
        records::write_record(&self.step_record(key), layer)
    }

    fn step_record(&self, key: &str) -> PathBuf {
        self.engine.disk.steps().join(format!("{key}.json"))
    }

    /// The image that was pulled for the recipe base of this key.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn pulled_image(&self, key: &str) -> Result<Option<PulledImage>, EngineError> {
        records::read_record(&self.pulled_record(key))
    }

    /// Records the image that was pulled for a recipe base.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn set_pulled_image(&self, key: &str, image: &PulledImage) -> Result<(), EngineError> {
        records::write_record(&self.pulled_record(key), image)
    }

    fn pulled_record(&self, key: &str) -> PathBuf {
        self.engine.disk.pulled().join(format!("{key}.json"))
    }
}

/// Copies everything in a folder into another, with owners, modes, times, attributes and holes.
///
/// # Errors
/// When something cannot be read or written.
pub fn copy_tree(source: &Path, target: &Path) -> Result<(), EngineError> {
    let delta = Delta { source, target, previous: &Index::default() };
    delta.copy_all(Pass::ALL, 0, &mut || Ok(())).map(drop)
}
