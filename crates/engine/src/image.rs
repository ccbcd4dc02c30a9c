//! Image records: a stack of layers with its config, under a name. The records live in the cache
//! that all homes share. `layer_cache` offers what making an image needs; the crate
//! `harvest-images` makes them.

use std::path::PathBuf;

use harvest_proto::{ImageId, SandboxId, SnapshotId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError,
    disk::Disk,
    disk_usage::tree_bytes,
    records,
    sandbox_record::Record,
    spec::{ImageConfig, LayerId, Origin},
};

/// A stack of layers with its config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Identifies this build of the image; a rebuild gets a new id.
    pub id: ImageId,
    /// The name users refer to; a rebuild replaces the record of this name.
    pub name: String,
    /// The layers, bottom first.
    pub layers: Vec<LayerId>,
    /// Environment, user and working directory of commands.
    pub config: ImageConfig,
    /// The cache key of the whole recipe; unchanged as long as the recipe is.
    pub recipe_key: String,
    /// Disk usage of the layers.
    pub bytes: u64,
    /// When the image was made.
    pub created_at: Timestamp,
    /// A description of the source for people.
    pub source: String,
}

/// An image as it was pulled from a registry for a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PulledImage {
    /// The layers, bottom first.
    pub layers: Vec<LayerId>,
    /// Environment, user and working directory of commands.
    pub config: ImageConfig,
    /// The manifest's digest.
    pub digest: String,
}

/// Everything besides the image itself that uses at least one of its layers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ImageUsers {
    /// Names of other images.
    pub images: Vec<String>,
    /// Sandboxes of this home.
    pub sandboxes: Vec<SandboxId>,
    /// Snapshots of this home.
    pub snapshots: Vec<SnapshotId>,
}

/// Whether a text can name an image: at most 64 lower-case letters, digits, `-`, `_` and `.`, with
/// a letter or digit first. Such a name is also a safe file name.
#[must_use]
pub fn is_image_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= 64
        && name.bytes().next().is_some_and(plain)
        && name.bytes().all(|byte| plain(byte) || matches!(byte, b'-' | b'_' | b'.'))
}

impl Engine {
    /// The image with this name, if it exists.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn image(&self, name: &str) -> Result<Option<Image>, EngineError> {
        self.disk.image(name)
    }

    /// Every image, by name.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn images(&self) -> Result<Vec<Image>, EngineError> {
        self.disk.image_list()
    }

    /// Removes an image. The next [`Engine::gc`] removes its layers once nothing refers to them.
    /// Idempotent.
    ///
    /// # Errors
    /// When the record cannot be removed.
    pub fn image_remove(&self, name: &str) -> Result<(), EngineError> {
        self.disk.image_remove(name)
    }

    /// The root folders of the layers that a sandbox would start from, top first.
    ///
    /// # Errors
    /// When the image, the snapshot or a layer is missing.
    pub fn layer_folders(&self, from: &Origin) -> Result<Vec<PathBuf>, EngineError> {
        self.store.ensure_mounted()?;
        let (layers, _) = self.resolve(from)?;
        layers.iter().rev().map(|layer| self.disk.layer_path(layer)).collect()
    }

    /// The disk usage of each layer of an image, bottom first.
    ///
    /// # Errors
    /// When a layer is missing or cannot be read.
    pub fn image_layers(&self, image: &Image) -> Result<Vec<(LayerId, u64)>, EngineError> {
        let size =
            |layer: &LayerId| Ok((layer.clone(), tree_bytes(&self.disk.layer_path(layer)?)?));
        image.layers.iter().map(size).collect()
    }

    /// The other users of an image's layers; removing the image keeps the layers they use.
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
            if Record::read(&self.disk.home, &id)?.is_some_and(|record| shares(&record.layers)) {
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

    /// An image by its name; `None` for any text that cannot be a name.
    pub(crate) fn image(&self, name: &str) -> Result<Option<Image>, EngineError> {
        if is_image_name(name) { records::read_record(&self.image_path(name)) } else { Ok(None) }
    }

    /// Every image of the cache, by name.
    pub(crate) fn image_list(&self) -> Result<Vec<Image>, EngineError> {
        let records = records::read_records(&self.images())?;
        Ok(records.into_iter().map(|(_, image)| image).collect())
    }

    /// Writes an image's record and replaces the one of its name.
    pub(crate) fn image_write(&self, image: &Image) -> Result<(), EngineError> {
        records::write_record(&self.image_path(&image.name), image)
    }

    /// Removes an image's record. The next collection removes the layers that nothing else uses.
    pub(crate) fn image_remove(&self, name: &str) -> Result<(), EngineError> {
        if is_image_name(name) { records::remove_file(&self.image_path(name)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_as_image_name_finds_nothing() {
        let disk = Disk::temporary();
        records::write_record(&disk.home.path().join("secret.json"), &"secret").unwrap();
        assert_eq!(disk.image("../../home/secret").unwrap(), None);
        assert_eq!(disk.image("nothing").unwrap(), None);
    }
}
