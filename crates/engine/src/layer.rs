//! A layer: one immutable folder of a stack, known by its id. This file names layers and finds
//! them; what goes into one is the business of `snapshot` and `build`.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use harvest_proto::SnapshotId;
use rustix::fs::FileType;

use crate::{EngineError, disk::Disk, spec::LayerId, tree, writable};

/// The layer that holds what a snapshot adds. Derived, so that a retry finds what a crash left.
pub(crate) fn layer_of(snapshot: &SnapshotId) -> LayerId {
    snapshot.part().parse().expect("an id's random part is short and plain")
}

impl Disk {
    /// A layer's tree: this home's own first, then the cache that all homes share.
    pub(crate) fn layer_path(&self, id: &LayerId) -> Result<PathBuf, EngineError> {
        let own = writable::layer(&self.layers().join(id.as_str()), self.store());
        [own, self.cache_layers().join(id.as_str())]
            .into_iter()
            .find(|path| path.is_dir())
            .ok_or_else(|| EngineError::LayerMissing { layer: id.clone() })
    }

    /// The disk that a sandbox on these layers begins as a clone of: the topmost, when it was captured
    /// here on btrfs and something is left below it.
    pub(crate) fn cloned(&self, layers: &[LayerId]) -> Option<PathBuf> {
        let (top, below) = layers.split_last()?;
        let place = self.layers().join(top.as_str());
        (self.store().is_btrfs() && !below.is_empty() && place.is_dir()).then_some(place)
    }
}

/// What a tree takes on the disk, each file once however many names it has.
pub(crate) fn disk_usage(root: &Path) -> Result<u64, EngineError> {
    let mut seen = HashSet::new();
    let mut bytes = 0;
    tree::visit(root, &mut |_, _, stat| {
        if stat.st_nlink < 2
            || FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            || seen.insert(stat.st_ino)
        {
            // `st_blocks` counts units of 512 bytes whatever the file system's block size is.
            bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        }
        Ok(())
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_layer_is_found_before_one_of_the_cache() {
        let disk = Disk::temporary();
        let id: LayerId = "abcdefgh".parse().unwrap();
        assert!(matches!(disk.layer_path(&id), Err(EngineError::LayerMissing { .. })));
        std::fs::create_dir(disk.cache_layers().join("abcdefgh")).unwrap();
        assert_eq!(disk.layer_path(&id).unwrap(), disk.cache_layers().join("abcdefgh"));
        std::fs::create_dir(disk.layers().join("abcdefgh")).unwrap();
        assert_eq!(disk.layer_path(&id).unwrap(), disk.layers().join("abcdefgh"));
    }

    #[test]
    fn a_file_with_two_names_is_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("one"), vec![7; 65536]).unwrap();
        let before = disk_usage(folder.path()).unwrap();
        std::fs::hard_link(folder.path().join("one"), folder.path().join("two")).unwrap();
        assert_eq!(disk_usage(folder.path()).unwrap(), before);
    }
}
