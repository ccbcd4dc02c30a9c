//! Layers: immutable folders, stacked to form a disk, each known by its id. This file names layers
//! and finds them; `snapshot` and the images crate fill them.

use std::path::PathBuf;

use harvest_proto::SnapshotId;

use crate::{EngineError, disk::Disk, spec::LayerId, writable};

/// The layer that holds what a snapshot adds. Derived from the id, so that a retry after a crash
/// finds the layer of the first attempt.
pub(crate) fn layer_of(snapshot: &SnapshotId) -> LayerId {
    snapshot.part().parse().expect("an id's random part is a valid layer id")
}

impl Disk {
    /// A layer's tree: from this home if it is there, else from the cache that all homes share.
    pub(crate) fn layer_path(&self, id: &LayerId) -> Result<PathBuf, EngineError> {
        let own = writable::layer(&self.home.layers().join(id.as_str()), self.home.store());
        [own, self.cache_layers().join(id.as_str())]
            .into_iter()
            .find(|path| path.is_dir())
            .ok_or_else(|| EngineError::LayerMissing(id.clone()))
    }

    /// The subvolume that a sandbox on these layers starts as a clone of: the top layer, if it was
    /// captured in this home on btrfs and has layers below it.
    pub(crate) fn clone_source(&self, layers: &[LayerId]) -> Option<PathBuf> {
        let (top, below) = layers.split_last()?;
        let path = self.home.layers().join(top.as_str());
        (self.home.store().is_btrfs() && !below.is_empty() && path.is_dir()).then_some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_layers_take_precedence_over_cache_layers() {
        let disk = Disk::temporary();
        let id: LayerId = "abcdefgh".parse().unwrap();
        assert!(matches!(disk.layer_path(&id), Err(EngineError::LayerMissing { .. })));
        std::fs::create_dir(disk.cache_layers().join("abcdefgh")).unwrap();
        assert_eq!(disk.layer_path(&id).unwrap(), disk.cache_layers().join("abcdefgh"));
        std::fs::create_dir(disk.home.layers().join("abcdefgh")).unwrap();
        assert_eq!(disk.layer_path(&id).unwrap(), disk.home.layers().join("abcdefgh"));
    }
}
