//! A btrfs in a file of the home, mounted at `<home>/store`. Every block of the file is reserved before
//! it is needed, so a full disk of the host can never take one away from under the file system: who
//! writes inside then sees ENOSPC, and nothing else breaks.

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
    fs::{FallocateFlags, fallocate, statvfs},
    io::Errno,
    mount::{MountFlags, UnmountFlags},
};

use crate::{
    EngineError, btrfs,
    disk::{disk_error, remove_file},
    error::AtPath,
    home::make_private,
    loop_device::LoopDevice,
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

// What the file begins with, and the least it is of use with.
const FIRST_BYTES: u64 = 2 * GIB;
const LEAST_BYTES: u64 = 256 * MIB;

// A host with less than this is better off without a store of its own.
pub(super) const ROOMY_BYTES: u64 = 4 * FIRST_BYTES;

// Sizes are multiples of this: small beside every step, large beside every chunk header.
const GRAIN_BYTES: u64 = 64 * MIB;

// `nodiscard` keeps the blocks reserved. The ratio has metadata get a chunk for every four of data.
const OPTIONS: &CStr = c"nodiscard,metadata_ratio=4";

// A full store has no room for the record of a snapshot that itself takes none. A file of this size is
// given up piece by piece then; each piece holds many records, whoever else takes from it.
const RESERVE: &str = "reserve";
const RESERVE_BYTES: u64 = 16 * MIB;
const GIVEN_BYTES: u64 = MIB;

/// The store's file.
pub(super) fn path(home: &Path) -> PathBuf {
    home.join("store.btrfs")
}

fn place(home: &Path) -> PathBuf {
    home.join("store")
}

/// How large a new store is where so much is free; `None` when that is too little.
pub(super) fn first_size(free: u64) -> Option<u64> {
    let size = FIRST_BYTES.min(free / 2) / GRAIN_BYTES * GRAIN_BYTES;
    (size >= LEAST_BYTES).then_some(size)
}

/// How much is to be free inside, so that no writer gets ahead of us.
fn wanted_inside(size: u64) -> u64 {
    if size < FIRST_BYTES { size / 4 } else { GIB.max(size / 8) }
}

/// How large the file is to become, if it has to grow and the host has room.
fn next_size(size: u64, free_inside: u64, free_outside: u64, total_outside: u64) -> Option<u64> {
    if free_inside >= wanted_inside(size) {
        return None;
    }
    // The host itself needs some, for the records of others if not for ours.
    let spare = free_outside.saturating_sub(GIB.min(total_outside / 20));
    let step = GIB.max(size / 4).min(spare) / GRAIN_BYTES * GRAIN_BYTES;
    (step > 0).then_some(size + step)
}

/// Bytes free for us where a path is.
pub(super) fn free(path: &Path) -> Result<u64, EngineError> {
    let stat = statvfs(path).at("look at", path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes free inside the store.
pub(super) fn free_inside(home: &Path) -> Result<u64, EngineError> {
    free(&place(home))
}

/// Whether there is less room inside than there should be.
pub(super) fn is_short(home: &Path) -> Result<bool, EngineError> {
    let stat = statvfs(place(home)).at("look at", place(home))?;
    let (size, free) =
        (stat.f_blocks.saturating_mul(stat.f_frsize), stat.f_bavail.saturating_mul(stat.f_frsize));
    Ok(free < wanted_inside(size))
}

/// The program that makes a btrfs.
pub(super) fn mkfs() -> Option<PathBuf> {
    let found = std::env::var_os("PATH").unwrap_or_default();
    // A user's path may leave out what only root runs.
    std::env::split_paths(&found)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join("mkfs.btrfs"))
        .find(|path| path.is_file())
}

/// Makes the file, whole or not at all, and mounts it.
pub(super) fn make(home: &Path, free: u64) -> Result<(), EngineError> {
    // What an attempt left that was cut short, mounted perhaps.
    if place(home).exists() && is_mounted(home)? {
        unmount(home)?;
    }
    remove_file(&path(home))?;
    let size = first_size(free).ok_or(io::ErrorKind::StorageFull).at("make", path(home))?;
    let new = home.join("store.btrfs.new");
    remove_file(&new)?;
    let file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).at("make", &new)?;
    fallocate(&file, FallocateFlags::empty(), 0, size).at("reserve room for", &new)?;
    format(&new)?;
    // Once more: nothing is to be left of the holes a mkfs may have made.
    fallocate(&file, FallocateFlags::empty(), 0, size).at("reserve room for", &new)?;
    file.sync_all().at("sync", &new)?;
    fs::rename(&new, path(home)).at("keep", &new)?;
    mount(home)?;
    let top = File::open(place(home)).at("open", place(home))?;
    btrfs::enable_quotas(&top).at("turn quotas on in", place(home))?;
    rustix::fs::syncfs(&top).at("sync", place(home))
}

fn format(file: &Path) -> Result<(), EngineError> {
    let program = mkfs().ok_or(io::ErrorKind::NotFound).at("find", "mkfs.btrfs")?;
    // Two copies of metadata: with one, mkfs leaves it 8 MiB, and who fills the store with data leaves
    // none for the name of a snapshot. No discarding, which would give the reserved blocks back.
    let made = Command::new(program)
        .args([
            "--quiet",
            "--nodiscard",
            "--metadata",
            "dup",
            "--data",
            "single",
            "--label",
            "harvest",
        ])
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .at("run mkfs.btrfs on", file)?;
    if made.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&made.stderr).trim().to_owned();
    Err(disk_error("run mkfs.btrfs on", file, io::Error::other(said)))
}

/// Whether the store is mounted where this process can see it.
pub(super) fn is_mounted(home: &Path) -> Result<bool, EngineError> {
    let place = place(home);
    let inner = match fs::metadata(&place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        result => result.at("look at", &place)?.dev(),
    };
    Ok(inner != fs::metadata(home).at("look at", home)?.dev())
}

/// Mounts the store, unless it is. A device that carries the file already, in the zygote's mount table
/// say, is used again: one file must never be two file systems.
pub(super) fn mount(home: &Path) -> Result<(), EngineError> {
    make_private(&place(home))?;
    if is_mounted(home)? {
        return Ok(());
    }
    let path = path(home);
    let file = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    let device = match LoopDevice::find(&file).at("find the device of", &path)? {
        Some(device) => device,
        // It goes with its last mount, however that ends.
        None => LoopDevice::attach(&file, true).at("attach", &path)?,
    };
    let flags = MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount(device.path(), place(home), "btrfs", flags, Some(OPTIONS))
        .at("mount", place(home))?;
    // A crash may have come between the file's growth and the file system's.
    resize(home, &device)
}

/// Makes the store larger when its room runs out and the host has more.
pub(super) fn grow(home: &Path) -> Result<(), EngineError> {
    let path = path(home);
    let file = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    let size = file.metadata().at("look at", &path)?.len();
    let host = statvfs(home).at("look at", home)?;
    let (free, total) =
        (host.f_bavail.saturating_mul(host.f_frsize), host.f_blocks.saturating_mul(host.f_frsize));
    let Some(next) = next_size(size, free_inside(home)?, free, total) else { return Ok(()) };
    let reserved = fallocate(&file, FallocateFlags::empty(), 0, next)
        .map_err(io::Error::from)
        // Before the file system counts on it, the host must not forget it in a power cut.
        .and_then(|()| file.sync_all());
    if let Err(error) = reserved {
        // Nobody uses what lies beyond the old size yet.
        let _ = file.set_len(size);
        return Err(error).at("reserve room for", &path);
    }
    let device = LoopDevice::find(&file).at("find the device of", &path)?;
    device.map_or(Ok(()), |device| resize(home, &device))
}

fn resize(home: &Path, device: &LoopDevice) -> Result<(), EngineError> {
    device.refresh_capacity().at("resize", device.path())?;
    let place = place(home);
    File::open(&place).and_then(|top| btrfs::grow(&top)).at("resize", &place)
}

/// Has the reserve whole again: what is given up when a record finds no room.
pub(super) fn refill(home: &Path) -> Result<(), EngineError> {
    let path = place(home).join(RESERVE);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.at("open", &path)?;
    let size = file.metadata().at("look at", &path)?.len();
    if size < RESERVE_BYTES && free_inside(home)? > 4 * RESERVE_BYTES {
        fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES)
            .at("reserve room for", &path)?;
    }
    Ok(())
}

/// Gives up some of the reserve; false when nothing is left of it.
pub(super) fn give_way(home: &Path) -> Result<bool, EngineError> {
    let path = place(home).join(RESERVE);
    let Ok(file) = OpenOptions::new().write(true).open(&path) else { return Ok(false) };
    let size = file.metadata().at("look at", &path)?.len();
    if size == 0 {
        return Ok(false);
    }
    file.set_len(size.saturating_sub(GIVEN_BYTES)).at("give way in", &path)?;
    Ok(true)
}

/// Takes the mount away; false when somebody has something open in it.
pub(super) fn unmount(home: &Path) -> Result<bool, EngineError> {
    let place = place(home);
    // A thread of ours may be looking at it, or syncing.
    for _ in 0..100 {
        if !is_mounted(home)? {
            return Ok(true);
        }
        match rustix::mount::unmount(&place, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(Errno::BUSY) => thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error).at("unmount", &place),
        }
    }
    Ok(!is_mounted(home)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_store_leaves_the_host_at_least_as_much_as_it_takes() {
        assert_eq!(first_size(100 * GIB), Some(2 * GIB));
        assert_eq!(first_size(GIB), Some(512 * MIB));
        assert_eq!(first_size(511 * MIB), None);
    }

    #[test]
    fn a_store_grows_before_it_is_full_and_never_takes_the_hosts_last() {
        let roomy = 100 * GIB;
        assert_eq!(next_size(2 * GIB, GIB, roomy, roomy), None);
        assert_eq!(next_size(2 * GIB, GIB - 1, roomy, roomy), Some(3 * GIB));
        assert_eq!(next_size(40 * GIB, 4 * GIB, roomy, roomy), Some(50 * GIB));
        assert_eq!(next_size(2 * GIB, 0, GIB + 200 * MIB, roomy), Some(2 * GIB + 192 * MIB));
        assert_eq!(next_size(2 * GIB, 0, GIB, roomy), None);
        assert_eq!(next_size(2 * GIB, 0, 0, 0), None);
    }
}
