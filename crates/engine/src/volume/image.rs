//! A volume as an ext4 file system in a file: the kernel keeps its size and its number of files. Mounted
//! by a loop device that goes with its last user, in no mount table of the host.

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

use super::{OWNER, Volume, furnish};
use crate::{EngineError, error::AtPath, isolate::mounts, loop_device::LoopDevice};

const IMAGE: &str = "image";

// A file system its last user has just left is taken down within milliseconds, unless much is unwritten.
const LEAVING: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

// A larger journal is for busier disks than one sandbox's; a small volume has whatever mkfs gives it.
const JOURNAL_FROM_BYTES: u64 = 256 << 20;

/// Makes the file system, with every block it will ever need.
pub(super) fn make(volume: &Volume, folder: &Path) -> Result<(), EngineError> {
    let path = folder.join(IMAGE);
    let image = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
    let image = image.at("make", &path)?;
    image.set_len(volume.size_bytes).at("make", &path)?;
    // Ids 1 to 10 are the file system's own, 11 is a folder we remove.
    let inodes = (volume.files + 11).to_string();
    let owner = format!("root_owner={OWNER}:{OWNER}");
    // Nothing may be left for the kernel to zero: its way is to give blocks back to the host.
    let extended = format!("lazy_itable_init=0,lazy_journal_init=0,nodiscard,{owner}");
    let mut arguments =
        vec!["-q", "-F", "-b", "4096", "-m", "0", "-e", "remount-ro", "-N", &inodes];
    arguments.extend(["-E", &extended]);
    if volume.size_bytes >= JOURNAL_FROM_BYTES {
        arguments.extend(["-J", "size=16"]);
    }
    run(volume, "mkfs.ext4", &arguments, &path, 0)?;
    // After mkfs, which makes holes where it wants zeros.
    reserve(&image, volume.size_bytes).at("reserve", &path)?;
    image.sync_all().at("sync", &path)?;
    let root = mount(volume, folder)?;
    let _ = rustix::fs::unlinkat(&root, "lost+found", AtFlags::REMOVEDIR);
    furnish(&root, &volume.folders).at("furnish", path)
}

/// The file system's root, mounted nowhere.
pub(super) fn mount(volume: &Volume, folder: &Path) -> Result<OwnedFd, EngineError> {
    let path = folder.join(IMAGE);
    let image = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    // One device for all: two would each write what they know over what the other has written.
    let device = match LoopDevice::find(&image).at("find the loop device of", &path)? {
        Some(device) => device,
        None => {
            mend(volume, &image, &path)?;
            reserve(&image, volume.size_bytes).at("reserve", &path)?;
            LoopDevice::attach(&image, true).at("attach", &path)?
        }
    };
    let source = device.path().to_string_lossy().into_owned();
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let end = Instant::now() + LEAVING;
    loop {
        match mounts::new("ext4", &[("source", &source)], flags) {
            // The last one of its earlier users is on its way out.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                thread::sleep(LOOK_AGAIN);
            }
            result => return result.at("mount", path),
        }
    }
}

/// Whether somebody has it mounted; waits a moment for who is just leaving.
pub(super) fn is_in_use(folder: &Path) -> Result<bool, EngineError> {
    let path = folder.join(IMAGE);
    let image = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        result => result.at("open", &path)?,
    };
    let end = Instant::now() + Duration::from_secs(1);
    while LoopDevice::find(&image).at("find the loop device of", &path)?.is_some() {
        if Instant::now() > end {
            return Ok(true);
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(false)
}

/// Takes every block of the file that is missing.
fn reserve(image: &File, bytes: u64) -> io::Result<()> {
    if image.metadata()?.blocks().saturating_mul(512) < bytes {
        rustix::fs::fallocate(image, FallocateFlags::empty(), 0, bytes)?;
    }
    Ok(())
}

/// Brings a file system to order that was not unmounted: the host lost its power.
fn mend(volume: &Volume, image: &File, path: &Path) -> Result<(), EngineError> {
    let mut superblock = [0; 1024];
    image.read_exact_at(&mut superblock, 1024).at("read", path)?;
    if is_clean(&superblock) {
        return Ok(());
    }
    // 1: mended.
    run(volume, "e2fsck", &["-p"], path, 1)
}

fn is_clean(superblock: &[u8; 1024]) -> bool {
    // Offsets of <linux/fs/ext4>'s on-disk layout: s_state, s_feature_incompat.
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
    worst: i32,
) -> Result<(), EngineError> {
    let output = Command::new(find(program)).args(arguments).arg(image).env("LC_ALL", "C").output();
    let said = match output {
        Ok(output) if output.status.code().is_some_and(|code| code <= worst) => return Ok(()),
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            String::from_utf8_lossy(&text).split_whitespace().collect::<Vec<_>>().join(" ")
        }
        Err(error) => format!("{error} (package e2fsprogs)"),
    };
    Err(EngineError::VolumeTool { volume: volume.name.clone(), program, said })
}

/// Where such programs are, also for who has no path to them.
fn find(program: &str) -> PathBuf {
    let places = ["/usr/sbin", "/sbin"].map(|folder| Path::new(folder).join(program));
    places.into_iter().find(|path| path.is_file()).unwrap_or_else(|| program.into())
}
