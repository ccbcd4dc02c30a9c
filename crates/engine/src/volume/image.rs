//! A volume as an ext4 file system in a file: the kernel enforces its size and number of files.
//! Mounted through an autoclear loop device, detached: it appears in no mount table of the host.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{AtFlags, FallocateFlags},
    mount::MountAttrFlags,
};

use super::{OWNER, Volume, create_folders};
use crate::{EngineError, error::AtPath, isolate::mounts, loop_device::LoopDevice};

const IMAGE: &str = "image";

// The kernel unmounts a file system within milliseconds of its last use, unless much data is dirty.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

// From this size on, the journal is limited to 16 MiB, enough for one sandbox. Smaller volumes have
// the default of mkfs.
const SMALL_JOURNAL_FROM_BYTES: u64 = 256 << 20;

/// Creates the file system and, unless it is sparse, reserves all of its blocks.
pub(super) fn create(volume: &Volume, folder: &Path) -> Result<(), EngineError> {
    let path = folder.join(IMAGE);
    let image = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
    let image = image.at("create", &path)?;
    image.set_len(volume.size_bytes).at("create", &path)?;
    // Inodes 1 to 10 are reserved, 11 is `lost+found`, which is removed below.
    let inodes = (volume.files + 11).to_string();
    let owner = format!("root_owner={OWNER}:{OWNER}");
    // No lazy initialization of reserved blocks: the kernel would zero them by releasing them to
    // the host. The blocks of a new sparse file are zero already.
    let lazy = u8::from(volume.sparse);
    let extended = format!("lazy_itable_init={lazy},lazy_journal_init={lazy},nodiscard,{owner}");
    let mut arguments =
        vec!["-q", "-F", "-b", "4096", "-m", "0", "-e", "remount-ro", "-N", &inodes];
    arguments.extend(["-E", &extended]);
    if volume.size_bytes >= SMALL_JOURNAL_FROM_BYTES {
        arguments.extend(["-J", "size=16"]);
    }
    run(volume, "mkfs.ext4", &arguments, &path, 0)?;
    // After mkfs, which punches holes in place of zeros.
    reserve(volume, &image).at("reserve", &path)?;
    image.sync_all().at("sync", &path)?;
    let root = mount(volume, folder)?;
    let _ = rustix::fs::unlinkat(&root, "lost+found", AtFlags::REMOVEDIR);
    create_folders(&root, &volume.folders).at("create the folders of", path)
}

/// Mounts the file system detached and returns its root.
pub(super) fn mount(volume: &Volume, folder: &Path) -> Result<OwnedFd, EngineError> {
    let path = folder.join(IMAGE);
    let image = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    // All users share one device: two devices for one file would corrupt the file system.
    let device = match LoopDevice::find(&image).at("find the loop device of", &path)? {
        Some(device) => device,
        None => {
            repair(volume, &image, &path)?;
            reserve(volume, &image).at("reserve", &path)?;
            LoopDevice::attach(&image).at("attach", &path)?
        }
    };
    let source = device.path().to_string_lossy().into_owned();
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mut options = vec![("source", source.as_str())];
    if volume.sparse {
        // Blocks of deleted files go back to the host, and no thread writes zeros to unused ones.
        options.extend([("discard", ""), ("noinit_itable", "")]);
    }
    let deadline = Instant::now() + UNMOUNT_TIMEOUT;
    loop {
        match mounts::new("ext4", &options, flags) {
            // The unmount of an earlier user is still in progress.
            Err(error)
                if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline =>
            {
                thread::sleep(RETRY_INTERVAL);
            }
            result => return result.at("mount", path),
        }
    }
}

/// Whether the volume is mounted. Waits up to a second for an unmount in progress.
pub(super) fn is_in_use(folder: &Path) -> Result<bool, EngineError> {
    let path = folder.join(IMAGE);
    let image = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        result => result.at("open", &path)?,
    };
    let deadline = Instant::now() + Duration::from_secs(1);
    while LoopDevice::find(&image).at("find the loop device of", &path)?.is_some() {
        if Instant::now() > deadline {
            return Ok(true);
        }
        thread::sleep(RETRY_INTERVAL);
    }
    Ok(false)
}

/// Reserves all blocks of the file, unless the volume is sparse.
fn reserve(volume: &Volume, image: &File) -> io::Result<()> {
    let bytes = volume.size_bytes;
    if !volume.sparse && image.metadata()?.blocks().saturating_mul(512) < bytes {
        rustix::fs::fallocate(image, FallocateFlags::empty(), 0, bytes)?;
    }
    Ok(())
}

/// The bytes that the file takes on the host's disk.
pub(super) fn allocated_bytes(folder: &Path) -> io::Result<u64> {
    Ok(folder.join(IMAGE).metadata()?.blocks().saturating_mul(512))
}

/// Repairs a file system that was not cleanly unmounted, as after a power cut.
fn repair(volume: &Volume, image: &File, path: &Path) -> Result<(), EngineError> {
    let mut superblock = [0; 1024];
    image.read_exact_at(&mut superblock, 1024).at("read", path)?;
    if is_clean(&superblock) {
        return Ok(());
    }
    // Exit code 1: errors were corrected.
    run(volume, "e2fsck", &["-p"], path, 1)
}

fn is_clean(superblock: &[u8; 1024]) -> bool {
    // Offsets in the ext4 superblock: s_state, s_feature_incompat.
    let state = u16::from_le_bytes([superblock[0x3a], superblock[0x3b]]);
    let needs_recovery = superblock[0x60] & 4 != 0;
    let (valid, errors) = (state & 1 != 0, state & 2 != 0);
    valid && !errors && !needs_recovery
}

fn run(
    volume: &Volume,
    program: &'static str,
    arguments: &[&str],
    image: &Path,
    max_exit_code: i32,
) -> Result<(), EngineError> {
    let output =
        Command::new(find_program(program)).args(arguments).arg(image).env("LC_ALL", "C").output();
    let message = match output {
        Ok(output) if output.status.code().is_some_and(|code| code <= max_exit_code) => {
            return Ok(());
        }
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            String::from_utf8_lossy(&text).split_whitespace().collect::<Vec<_>>().join(" ")
        }
        Err(error) => format!("{error} (package e2fsprogs)"),
    };
    Err(EngineError::VolumeTool { volume: volume.name.clone(), program, message })
}

/// The path of a program in an sbin folder, which a user's PATH may lack.
fn find_program(program: &str) -> PathBuf {
    let places = ["/usr/sbin", "/sbin"].map(|folder| Path::new(folder).join(program));
    places.into_iter().find(|path| path.is_file()).unwrap_or_else(|| program.into())
}
