//! The writable layer of a sandbox's disk in both forms: a plain folder, or a btrfs subvolume with
//! `upper` and `work` in it. Creates it, clones it from a layer and captures it as a layer.
//!
//! ```text
//! dir      sandboxes/<id>/{upper,work}            layers/<layer> = an upper
//! btrfs    sandboxes/<id>/disk/{upper,work}       layers/<layer> = a disk, with `upper`
//! ```

use std::{
    ffi::{CStr, CString},
    fs::{self, DirBuilder, File, Permissions},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::{EngineError, btrfs, error::AtPath, store::StoreKind, trash};

const DISK: &CStr = c"disk";

// With more dirty data on the host than this, a flush precedes the freeze. Below it, flushing
// during the freeze is as fast as an extra commit.
const FLUSH_THRESHOLD_KIB: u64 = 8 << 10;

/// The initial content of a sandbox's writable layer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WritableOrigin<'a> {
    Empty,
    /// A clone of this layer of the home, which is on btrfs.
    Clone(&'a Path),
}

/// The folder with `upper` and `work`, below a sandbox's folder.
pub(crate) fn folder(sandbox: &Path, store: StoreKind) -> PathBuf {
    if store.is_btrfs() { sandbox.join("disk") } else { sandbox.to_owned() }
}

/// The tree of the layer that is stored at `path` in the home.
pub(crate) fn layer(path: &Path, store: StoreKind) -> PathBuf {
    if store.is_btrfs() { path.join("upper") } else { path.to_owned() }
}

/// The folder that is renamed into `layers/` when a sandbox is saved.
pub(crate) fn saved_part(sandbox: &Path, store: StoreKind) -> PathBuf {
    if store.is_btrfs() { sandbox.join("disk") } else { sandbox.join("upper") }
}

/// Creates the writable layer in a sandbox's new folder. `bytes` limits its size, on btrfs only.
pub(crate) fn create(
    sandbox: &Path,
    store: StoreKind,
    origin: WritableOrigin<'_>,
    bytes: Option<u64>,
) -> Result<(), EngineError> {
    let writable = folder(sandbox, store);
    if store.is_btrfs() {
        create_subvolume(sandbox, origin)?;
        if let Some(bytes) = bytes {
            raise_limit(sandbox, bytes, 0)?;
        }
    }
    if matches!(origin, WritableOrigin::Empty) {
        // The mode of `upper` becomes the mode of `/` inside.
        create_folder(&writable.join("upper"))?;
    }
    create_folder(&writable.join("work"))
}

/// Limits a sandbox's disk, which is on btrfs, to `bytes` more than the `used` bytes it has now.
/// Needed after each capture: the snapshot refers to all of them, so deleting files inside would
/// free nothing.
pub(crate) fn raise_limit(sandbox: &Path, bytes: u64, used: u64) -> Result<(), EngineError> {
    let disk = sandbox.join("disk");
    let open = File::open(&disk).at("open", &disk)?;
    btrfs::limit(&open, bytes.saturating_add(used)).at("limit the size of", &disk)
}

fn create_subvolume(sandbox: &Path, origin: WritableOrigin<'_>) -> Result<(), EngineError> {
    let parent = File::open(sandbox).at("open", sandbox)?;
    match origin {
        WritableOrigin::Empty => btrfs::create(&parent, DISK).at("create a disk in", sandbox),
        WritableOrigin::Clone(layer) => {
            let source = File::open(layer).at("open", layer)?;
            btrfs::snapshot(&source, &parent, DISK).at("clone", layer)?;
            // The work folder of the captured sandbox; overlayfs needs an empty one.
            trash::delete(&sandbox.join("disk"), &["work".to_owned()])
        }
    }
}

fn create_folder(path: &Path) -> Result<(), EngineError> {
    DirBuilder::new().mode(0o755).create(path).at("create", path)?;
    // Whatever umask the user has.
    fs::set_permissions(path, Permissions::from_mode(0o755)).at("create", path)
}

/// Flushes the dirty data of a running sandbox, so that the capture while frozen is short.
pub(crate) fn flush(sandbox: &Path, partial: &Path, name: &str) -> Result<(), EngineError> {
    let dirty = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    if !is_worth_flushing(&dirty) {
        return Ok(());
    }
    // A capture for its side effect: it flushes only this subvolume, while a sync would also wait
    // for all other sandboxes.
    capture(sandbox, partial, name)?;
    destroy(partial, name)
}

fn is_worth_flushing(meminfo: &str) -> bool {
    let kib = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    kib("Dirty:").unwrap_or(u64::MAX).saturating_add(kib("Writeback:").unwrap_or(0))
        > FLUSH_THRESHOLD_KIB
}

/// Captures a sandbox's disk as a layer. Durable when this returns.
pub(crate) fn capture(sandbox: &Path, layers: &Path, name: &str) -> Result<(), EngineError> {
    let disk = sandbox.join("disk");
    let source = File::open(&disk).at("open", &disk)?;
    let target = File::open(layers).at("open", layers)?;
    let name = CString::new(name).at("capture", &disk)?;
    btrfs::snapshot(&source, &target, &name).at("capture", disk)
}

/// Deletes a subvolume.
pub(crate) fn destroy(folder: &Path, name: &str) -> Result<(), EngineError> {
    let parent = File::open(folder).at("open", folder)?;
    let path = folder.join(name);
    let name = CString::new(name).at("delete", &path)?;
    btrfs::destroy(&parent, &name).at("delete", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_dirty_data_is_not_flushed() {
        let meminfo = |dirty: u64, back: u64| {
            format!(
                "MemTotal: 1 kB\nDirty:    {dirty} kB\nWriteback:  {back} kB\nWritebackTmp: 9999999 kB\n"
            )
        };
        assert!(!is_worth_flushing(&meminfo(1000, 1000)));
        assert!(is_worth_flushing(&meminfo(8000, 1000)));
        assert!(is_worth_flushing("unknown format"));
    }
}
