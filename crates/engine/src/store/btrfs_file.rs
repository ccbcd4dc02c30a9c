//! A btrfs in a file of the home, mounted at `<home>/store`. Every block of the file is reserved
//! before it is needed, so a full disk of the host cannot corrupt the file system: writers inside
//! get ENOSPC.

use std::{
    ffi::CStr,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
    mount::{MountFlags, UnmountFlags},
};

use crate::{
    EngineError, btrfs,
    disk_thresholds::free_and_total_bytes,
    error::AtPath,
    loop_device::LoopDevice,
    records::{create_private_dir, remove_file},
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

// The initial size of the file, and the smallest useful one.
const INITIAL_BYTES: u64 = 2 * GIB;
const MIN_BYTES: u64 = 256 * MIB;

// With less free space than this, `auto` does not create a store in a file.
pub(super) const MIN_FREE_FOR_AUTO_BYTES: u64 = 4 * INITIAL_BYTES;

// Sizes are multiples of this: small compared to a growth step, large compared to chunk headers.
const SIZE_STEP_BYTES: u64 = 64 * MIB;

// `nodiscard` keeps the blocks reserved. The ratio allocates one metadata chunk per four data
// chunks. `nodatacow` overwrites data in place unless a snapshot shares it, which makes random
// writes four times as fast; it gives up checksums of data, which the host's file system need not
// have either.
const MOUNT_OPTIONS: &CStr = c"nodiscard,metadata_ratio=4,nodatacow";

// A full store has no space for the record of a snapshot, although the snapshot itself needs none.
// Then this file is shrunk chunk by chunk; a chunk fits many records, even if others use some of
// it.
const RESERVE: &str = "reserve";
const RESERVE_BYTES: u64 = 16 * MIB;
const RESERVE_CHUNK_BYTES: u64 = MIB;

/// The store's file.
pub(super) fn path(home: &Path) -> PathBuf {
    home.join("store.btrfs")
}

fn mount_point(home: &Path) -> PathBuf {
    home.join("store")
}

/// The size of a new store with this much free space on the host; `None` when it is too little.
pub(super) fn initial_size(free: u64) -> Option<u64> {
    let size = INITIAL_BYTES.min(free / 2) / SIZE_STEP_BYTES * SIZE_STEP_BYTES;
    (size >= MIN_BYTES).then_some(size)
}

/// The free space to keep inside, so that writers do not fill the store before it grows.
fn target_free_bytes(size: u64) -> u64 {
    if size < INITIAL_BYTES { size / 4 } else { GIB.max(size / 8) }
}

/// The next size of the file, if it must grow and the host has space.
fn next_size(size: u64, free_inside: u64, free_outside: u64, total_outside: u64) -> Option<u64> {
    if free_inside >= target_free_bytes(size) {
        return None;
    }
    // Leaves some space to the host.
    let spare = free_outside.saturating_sub(GIB.min(total_outside / 20));
    let step = GIB.max(size / 4).min(spare) / SIZE_STEP_BYTES * SIZE_STEP_BYTES;
    (step > 0).then_some(size + step)
}

/// Bytes free inside the store.
pub(super) fn free_bytes_inside(home: &Path) -> Result<u64, EngineError> {
    Ok(free_and_total_bytes(&mount_point(home))?.0)
}

/// Whether there is less free space inside than there should be.
pub(super) fn needs_growth(home: &Path) -> Result<bool, EngineError> {
    let (free, size) = free_and_total_bytes(&mount_point(home))?;
    Ok(free < target_free_bytes(size))
}

/// The path of `mkfs.btrfs`, if it is installed.
pub(super) fn find_mkfs() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // A user's PATH may lack the sbin folders.
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join("mkfs.btrfs"))
        .find(|path| path.is_file())
}

/// Creates the file atomically and mounts it.
pub(super) fn create(home: &Path, free: u64) -> Result<(), EngineError> {
    // An interrupted attempt may have left a file, possibly mounted.
    if mount_point(home).exists() && is_mounted(home)? {
        unmount(home)?;
    }
    remove_file(&path(home))?;
    let size = initial_size(free).ok_or(io::ErrorKind::StorageFull).at("create", path(home))?;
    let new = home.join("store.btrfs.new");
    remove_file(&new)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
    let file = file.at("create", &new)?;
    fallocate(&file, FallocateFlags::empty(), 0, size).at("reserve space for", &new)?;
    format(&new)?;
    // Again, because mkfs may have punched holes.
    fallocate(&file, FallocateFlags::empty(), 0, size).at("reserve space for", &new)?;
    file.sync_all().at("sync", &new)?;
    fs::rename(&new, path(home)).at("rename", &new)?;
    mount(home)?;
    let top = File::open(mount_point(home)).at("open", mount_point(home))?;
    btrfs::enable_quotas(&top).at("enable quotas in", mount_point(home))?;
    rustix::fs::syncfs(&top).at("sync", mount_point(home))
}

fn format(file: &Path) -> Result<(), EngineError> {
    let program = find_mkfs().ok_or(io::ErrorKind::NotFound).at("find", "mkfs.btrfs")?;
    // Duplicated metadata: with a single copy, mkfs allocates only 8 MiB for it, and a store full
    // of data could not even create a snapshot. No discard, which would release the reserved
    // blocks.
    let output = Command::new(program)
        .args(["--quiet", "--nodiscard", "--metadata", "dup"])
        .args(["--data", "single", "--label", "harvest"])
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .at("run mkfs.btrfs on", file)?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(EngineError::file("run mkfs.btrfs on", file, io::Error::other(message)))
}

/// Whether the store is mounted in this process's mount namespace.
pub(super) fn is_mounted(home: &Path) -> Result<bool, EngineError> {
    let mount_point = mount_point(home);
    let inner = match fs::metadata(&mount_point) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        result => result.at("access", &mount_point)?.dev(),
    };
    Ok(inner != fs::metadata(home).at("access", home)?.dev())
}

/// Mounts the store if it is not mounted. Reuses a loop device that has the file already, for
/// example in the zygote's mount namespace: the file must never be mounted through two devices.
pub(super) fn mount(home: &Path) -> Result<(), EngineError> {
    create_private_dir(&mount_point(home))?;
    if is_mounted(home)? {
        return Ok(());
    }
    let path = path(home);
    let file = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    let device = match LoopDevice::find(&file).at("find the device of", &path)? {
        Some(device) => device,
        // Autoclear: the kernel detaches the device after its last unmount.
        None => LoopDevice::attach_uncached(&file).at("attach", &path)?,
    };
    let flags = MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount(device.path(), mount_point(home), "btrfs", flags, Some(MOUNT_OPTIONS))
        .at("mount", mount_point(home))?;
    // A crash may have interrupted `grow` between resizing the file and the file system.
    resize(home, &device)
}

/// Grows the store when its free space runs short and the host has space.
pub(super) fn grow(home: &Path) -> Result<(), EngineError> {
    let path = path(home);
    let file = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    let size = file.metadata().at("access", &path)?.len();
    let (free, total) = free_and_total_bytes(home)?;
    let Some(next) = next_size(size, free_bytes_inside(home)?, free, total) else { return Ok(()) };
    let reserved = fallocate(&file, FallocateFlags::empty(), 0, next)
        .map_err(io::Error::from)
        // The new size must survive a power cut before the file system uses it.
        .and_then(|()| file.sync_all());
    if let Err(error) = reserved {
        // Nothing uses the file beyond the old size yet.
        let _ = file.set_len(size);
        return Err(error).at("reserve space for", &path);
    }
    let device = LoopDevice::find(&file).at("find the device of", &path)?;
    device.map_or(Ok(()), |device| resize(home, &device))
}

fn resize(home: &Path, device: &LoopDevice) -> Result<(), EngineError> {
    device.refresh_capacity().at("resize", device.path())?;
    let mount_point = mount_point(home);
    File::open(&mount_point)
        .and_then(|top| btrfs::resize_to_device(&top))
        .at("resize", &mount_point)
}

/// Restores the reserve to its full size, if there is space.
pub(super) fn refill_reserve(home: &Path) -> Result<(), EngineError> {
    let path = mount_point(home).join(RESERVE);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.at("open", &path)?;
    let size = file.metadata().at("access", &path)?.len();
    if size < RESERVE_BYTES && free_bytes_inside(home)? > 4 * RESERVE_BYTES {
        fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES)
            .at("reserve space for", &path)?;
    }
    Ok(())
}

/// Releases one chunk of the reserve; false when nothing is left of it.
pub(super) fn release_reserve(home: &Path) -> Result<bool, EngineError> {
    let path = mount_point(home).join(RESERVE);
    let Ok(file) = OpenOptions::new().write(true).open(&path) else { return Ok(false) };
    let size = file.metadata().at("access", &path)?.len();
    if size == 0 {
        return Ok(false);
    }
    file.set_len(size.saturating_sub(RESERVE_CHUNK_BYTES)).at("shrink the reserve", &path)?;
    Ok(true)
}

/// Unmounts the store; false while files in it are open.
pub(super) fn unmount(home: &Path) -> Result<bool, EngineError> {
    let mount_point = mount_point(home);
    // Threads of this process may still hold files for a moment.
    for _ in 0..100 {
        if !is_mounted(home)? {
            return Ok(true);
        }
        match rustix::mount::unmount(&mount_point, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(Errno::BUSY) => thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error).at("unmount", &mount_point),
        }
    }
    Ok(!is_mounted(home)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_stores_take_at_most_half_the_space() {
        assert_eq!(initial_size(100 * GIB), Some(2 * GIB));
        assert_eq!(initial_size(GIB), Some(512 * MIB));
        assert_eq!(initial_size(511 * MIB), None);
    }

    #[test]
    fn stores_grow_early_but_leave_the_host_space() {
        let roomy = 100 * GIB;
        assert_eq!(next_size(2 * GIB, GIB, roomy, roomy), None);
        assert_eq!(next_size(2 * GIB, GIB - 1, roomy, roomy), Some(3 * GIB));
        assert_eq!(next_size(40 * GIB, 4 * GIB, roomy, roomy), Some(50 * GIB));
        assert_eq!(next_size(2 * GIB, 0, GIB + 200 * MIB, roomy), Some(2 * GIB + 192 * MIB));
        assert_eq!(next_size(2 * GIB, 0, GIB, roomy), None);
        assert_eq!(next_size(2 * GIB, 0, 0, 0), None);
    }
}
