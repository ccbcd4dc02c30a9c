//! The writable part of a sandbox's disk in both forms: a plain folder, or a btrfs subvolume with
//! `upper` and `work` in it. How one is made, cloned from a layer, kept as a layer and captured.
//!
//! ```text
//! dir      sandboxes/<id>/{upper,work}            layers/<layer> = an upper
//! btrfs    sandboxes/<id>/disk/{upper,work}       layers/<layer> = a disk; its `upper` is the layer
//! ```

use std::{
    ffi::{CStr, CString},
    fs::{self, DirBuilder, File},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use crate::{EngineError, btrfs, disk::disk_error, error::AtPath, store::StoreKind, trash};

const DISK: &CStr = c"disk";

// Flushed ahead of a freeze when the host holds more unwritten data than this: below, the frozen
// flush takes no longer than a second commit would.
const FLUSH_KIB: u64 = 8 << 10;

/// What a sandbox's writable part begins as.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Begin<'a> {
    /// Nothing.
    Empty,
    /// This layer of the home, which is on btrfs.
    Clone(&'a Path),
}

/// The folder with `upper` and `work` of the sandbox with this folder.
pub(crate) fn folder(sandbox: &Path, store: StoreKind) -> PathBuf {
    if store.is_btrfs() { sandbox.join("disk") } else { sandbox.to_owned() }
}

/// The tree of the layer kept at `place` in the home.
pub(crate) fn layer(place: &Path, store: StoreKind) -> PathBuf {
    if store.is_btrfs() { place.join("upper") } else { place.to_owned() }
}

/// What is renamed to become a layer when the sandbox with this folder ends.
pub(crate) fn kept(sandbox: &Path, store: StoreKind) -> PathBuf {
    if store.is_btrfs() { sandbox.join("disk") } else { sandbox.join("upper") }
}

/// Makes the writable part in a sandbox's new folder, of at most `bytes` where that is said.
pub(crate) fn make(
    sandbox: &Path,
    store: StoreKind,
    begin: Begin<'_>,
    bytes: Option<u64>,
) -> Result<(), EngineError> {
    let writable = folder(sandbox, store);
    if store.is_btrfs() {
        make_subvolume(sandbox, begin)?;
        if let Some(bytes) = bytes {
            let open = File::open(&writable).at("open", &writable)?;
            btrfs::limit(&open, bytes).at("limit the size of", &writable)?;
        }
    }
    if matches!(begin, Begin::Empty) {
        // The upper folder's mode is that of `/` inside.
        make_folder(&writable.join("upper"))?;
    }
    make_folder(&writable.join("work"))
}

/// Lets the sandbox with this folder take so much more than the `taken` it has now. To be said after each
/// capture: a snapshot holds all of that, so that nothing the sandbox deletes would make room again.
pub(crate) fn limit_again(sandbox: &Path, bytes: u64, taken: u64) -> Result<(), EngineError> {
    let disk = sandbox.join("disk");
    let open = File::open(&disk).at("open", &disk)?;
    btrfs::limit(&open, bytes.saturating_add(taken)).at("limit the size of", &disk)
}

fn make_subvolume(sandbox: &Path, begin: Begin<'_>) -> Result<(), EngineError> {
    let parent = File::open(sandbox).at("open", sandbox)?;
    match begin {
        Begin::Empty => btrfs::create(&parent, DISK).at("make a disk in", sandbox),
        Begin::Clone(layer) => {
            let source = File::open(layer).at("open", layer)?;
            btrfs::snapshot(&source, &parent, DISK).at("clone", layer)?;
            // What overlay was in the middle of when the layer was taken.
            trash::delete(&sandbox.join("disk"), &["work".to_owned()])
        }
    }
}

fn make_folder(path: &Path) -> Result<(), EngineError> {
    DirBuilder::new().mode(0o755).create(path).at("make", path)
}

/// Writes down most of what a running sandbox has not, so that the frozen capture has little to do.
pub(crate) fn flush(sandbox: &Path, partial: &Path, name: &str) -> Result<(), EngineError> {
    let dirty = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    if !is_worth_flushing(&dirty) {
        return Ok(());
    }
    // A capture for its side effect: it writes down what this one subvolume has, while a sync would
    // wait for every other sandbox's too.
    capture(sandbox, partial, name)?;
    destroy(partial, name)
}

fn is_worth_flushing(meminfo: &str) -> bool {
    let kib = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    kib("Dirty:").unwrap_or(u64::MAX).saturating_add(kib("Writeback:").unwrap_or(0)) > FLUSH_KIB
}

/// Makes a layer of the disk of the sandbox with this folder; it is on the host's disk then.
pub(crate) fn capture(sandbox: &Path, layers: &Path, name: &str) -> Result<(), EngineError> {
    let disk = sandbox.join("disk");
    let source = File::open(&disk).at("open", &disk)?;
    let target = File::open(layers).at("open", layers)?;
    let name = CString::new(name).map_err(|e| disk_error("capture", &disk, e))?;
    btrfs::snapshot(&source, &target, &name).at("capture", disk)
}

/// Takes a subvolume away.
pub(crate) fn destroy(folder: &Path, name: &str) -> Result<(), EngineError> {
    let parent = File::open(folder).at("open", folder)?;
    let path = folder.join(name);
    let name = CString::new(name).map_err(|e| disk_error("delete", &path, e))?;
    btrfs::destroy(&parent, &name).at("delete", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_unwritten_data_is_not_worth_a_capture_of_its_own() {
        let meminfo = |dirty: u64, back: u64| {
            format!(
                "MemTotal: 1 kB\nDirty:    {dirty} kB\nWriteback:  {back} kB\nWritebackTmp: 9999999 kB\n"
            )
        };
        assert!(!is_worth_flushing(&meminfo(1000, 1000)));
        assert!(is_worth_flushing(&meminfo(8000, 1000)));
        assert!(is_worth_flushing("nothing we know"));
    }
}
