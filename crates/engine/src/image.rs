//! Images: a stack of layers with its config, under a name. Records live in the cache that all homes
//! share. Building them is the business of `build`.

use std::path::PathBuf;

use harvest_proto::{ImageId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    EngineError,
    disk::{self, Disk},
    recipe::is_image_name,
    spec::{ImageConfig, LayerId},
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
