//! Images: a stack of layers with its config, under a name. Records live in the cache that all homes
//! share. Building them is the business of `build`.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use harvest_proto::{ImageId, SandboxId, SnapshotId, Timestamp};
use rustix::fs::{FlockOperation, Mode};
use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError,
    build::Progress,
    disk::{self, Disk, disk_error},
    layer::disk_usage,
    recipe::is_image_name,
    sandbox::Record,
    spec::{ImageConfig, LayerId},
    trash, tree,
};

/// A stack of layers with its config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Names this build of it.
    pub id: ImageId,
    /// What people call it.
    pub name: String,
    /// What it consists of, bottom first.
    pub layers: Vec<LayerId>,
    /// What commands get.
    pub config: ImageConfig,
    /// Equal to the recipe's key as long as the recipe has not changed.
    pub recipe_key: String,
    /// What its layers take on the disk.
    pub bytes: u64,
    /// When it was built.
    pub created_at: Timestamp,
    /// What it was made from, in words.
    #[serde(default)]
    pub source: String,
}

/// Who stands on an image's layers besides the image itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ImageUsers {
    /// Other images.
    pub images: Vec<String>,
    /// Sandboxes of this home.
    pub sandboxes: Vec<SandboxId>,
    /// Snapshots of this home.
    pub snapshots: Vec<SnapshotId>,
}

impl Engine {
    /// What each layer of an image takes on the disk, bottom first.
    ///
    /// # Errors
    /// When a layer is missing or cannot be read.
    pub fn image_layers(&self, image: &Image) -> Result<Vec<(LayerId, u64)>, EngineError> {
        let size =
            |layer: &LayerId| Ok((layer.clone(), disk_usage(&self.disk.layer_path(layer)?)?));
        image.layers.iter().map(size).collect()
    }

    /// Who else stands on an image's layers; these stay when the image is removed.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn image_users(&self, image: &Image) -> Result<ImageUsers, EngineError> {
        let shares = |layers: &[LayerId]| layers.iter().any(|layer| image.layers.contains(layer));
        let mut users = ImageUsers::default();
        for other in self.disk.image_list()? {
            if other.name != image.name && shares(&other.layers) {
                users.images.push(other.name);
            }
        }
        for id in self.list()? {
            if Record::read(&self.home, &id)?.is_some_and(|record| shares(&record.layers)) {
                users.sandboxes.push(id);
            }
        }
        for snapshot in self.disk.snapshot_list()? {
            if shares(&snapshot.layers) {
                users.snapshots.push(snapshot.id);
            }
        }
        Ok(users)
    }
}

impl Disk {
    fn image_path(&self, name: &str) -> PathBuf {
        self.images().join(format!("{name}.json"))
    }

    /// An image by its name, whatever text that is.
    pub(crate) fn image(&self, name: &str) -> Result<Option<Image>, EngineError> {
        if is_image_name(name) { disk::read_record(&self.image_path(name)) } else { Ok(None) }
    }

    /// Every image of the cache, by name.
    pub(crate) fn image_list(&self) -> Result<Vec<Image>, EngineError> {
        let mut images = Vec::new();
        for name in disk::record_names(&self.images())? {
            images.extend(self.image(&name)?);
        }
        Ok(images)
    }

    /// Puts an image in the place of the one of its name.
    pub(crate) fn image_write(&self, image: &Image) -> Result<(), EngineError> {
        disk::write_record(&self.image_path(&image.name), image)
    }

    /// Held by whoever makes the image of this name: one at a time, the others wait.
    pub(crate) fn image_turn(
        &self,
        name: &str,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<File, EngineError> {
        let path = self.building().join(format!("{name}.lock"));
        match disk::lock(&path, FlockOperation::NonBlockingLockExclusive) {
            Err(EngineError::File { source, .. }) if source.kind() == io::ErrorKind::WouldBlock => {
                progress(Progress::Waiting { image: name.to_owned() });
                disk::lock(&path, FlockOperation::LockExclusive)
            }
            other => other,
        }
    }

    /// Makes a layer of a folder that was filled in `building`. It is on the disk before it has its name:
    /// a layer that is there is whole, even after a power cut.
    pub(crate) fn layer_keep(&self, target: &Path, layer: &LayerId) -> Result<(), EngineError> {
        let root = tree::open_root(target)?;
        rustix::fs::fchmod(&root, Mode::from_raw_mode(0o755))
            .map_err(|e| disk_error("keep", target, e))?;
        rustix::fs::syncfs(&root).map_err(|e| disk_error("sync", target, e))?;
        let place = self.cache_layers().join(layer.as_str());
        match fs::rename(target, &place) {
            // Somebody else with the same layer was faster; theirs is as good.
            Err(_) if place.is_dir() => trash::throw_away(target, &self.cache_trash()),
            other => other.map_err(|e| disk_error("keep", &place, e)),
        }
    }

    /// Deletes what a failed build or import has made so far. At once: the disk may be full of it.
    pub(crate) fn destroy(&self, target: &Path) {
        let name = disk::random_name();
        // What cannot be moved or deleted now is collected later.
        if fs::rename(target, self.cache_trash().join(&name)).is_ok() {
            let _ = trash::delete(&self.cache_trash(), &[name]);
        }
    }

    /// Forgets an image. Its layers go with the next collection, if nothing else uses them.
    pub(crate) fn image_remove(&self, name: &str) -> Result<(), EngineError> {
        if is_image_name(name) { disk::remove_file(&self.image_path(name)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_a_path_finds_nothing() {
        let disk = Disk::temporary();
        disk::write_record(&disk.home().join("secret.json"), &"secret").unwrap();
        assert_eq!(disk.image("../../home/secret").unwrap(), None);
        assert_eq!(disk.image("nothing").unwrap(), None);
    }
}
