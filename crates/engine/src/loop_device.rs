//! A file as a block device. Knows nothing of what is on it, and mounts nothing.
//!
//! A device that is cleared *automatically* lives as long as somebody has it open or mounted: whoever
//! dies, however they die, the kernel takes it down. One that is not stays until somebody clears it.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use libc::{c_int, c_ulong};

const CONTROL: &str = "/dev/loop-control";

// From <linux/loop.h>.
const LOOP_GET_STATUS64: c_ulong = 0x4C05;
const LOOP_SET_CAPACITY: c_ulong = 0x4C07;
const LOOP_CONFIGURE: c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: c_ulong = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// How often another process may take the free device we were told of before we give up.
const TRIES: u32 = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    device_number: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Configuration {
    file: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// A loop device, kept in place while this value lives.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    /// Open for reading: a kernel may refuse to mount what somebody else could write to.
    file: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Makes `backing`, open for writing, a block device; `autoclear` ties it to its users' lives.
    pub(crate) fn attach(backing: &File, autoclear: bool) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        let mut last = io::Error::from(io::ErrorKind::ResourceBusy);
        for _ in 0..TRIES {
            match Self::attach_next(&control, backing, autoclear) {
                // Another process was quicker, or has just removed the device.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EBUSY | libc::ENXIO | libc::ENOENT)
                    ) =>
                {
                    last = error;
                }
                result => return result,
            }
        }
        Err(last)
    }

    fn attach_next(control: &File, backing: &File, autoclear: bool) -> io::Result<Self> {
        // SAFETY: this request takes no argument.
        let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let writable = OpenOptions::new().read(true).write(true).open(&path)?;
        // SAFETY: plain numbers, for all of which zero means "not asked for".
        let mut wanted: Configuration = unsafe { std::mem::zeroed() };
        wanted.file =
            u32::try_from(backing.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
        wanted.info.flags = if autoclear { LO_FLAGS_AUTOCLEAR } else { 0 };
        // SAFETY: the kernel reads a `struct loop_config`, which `wanted` is, and keeps no pointer to it.
        check(unsafe { libc::ioctl(writable.as_raw_fd(), LOOP_CONFIGURE, &raw const wanted) })?;
        // In this order: between the two nothing else may hold the device.
        let file = File::open(&path)?;
        drop(writable);
        Ok(Self { file, path })
    }

    /// The device that carries `backing` already, whoever made it.
    pub(crate) fn find(backing: &File) -> io::Result<Option<Self>> {
        let metadata = backing.metadata()?;
        for entry in fs::read_dir("/sys/block")? {
            let entry = entry?;
            if !entry.path().join("loop/backing_file").exists() {
                continue;
            }
            let path = Path::new("/dev").join(entry.file_name());
            // It may go away while we look; once it is open and answers, it stays.
            let Ok(file) = File::open(&path) else { continue };
            let Ok(info) = status(&file) else { continue };
            if (info.device, info.inode) == (metadata.dev(), metadata.ino()) {
                return Ok(Some(Self { file, path }));
            }
        }
        Ok(None)
    }

    /// `/dev/loopN`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the device as large as its file has become.
    pub(crate) fn refresh_capacity(&self) -> io::Result<()> {
        // SAFETY: this request takes no argument.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_CAPACITY, 0) }).map(drop)
    }
}

fn status(device: &File) -> io::Result<Info> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut info: Info = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a `struct loop_info64`, which `info` is.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) })?;
    Ok(info)
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of(device: &LoopDevice) -> u64 {
        let name = device.path().file_name().unwrap();
        let sectors = fs::read_to_string(Path::new("/sys/block").join(name).join("size")).unwrap();
        sectors.trim().parse::<u64>().unwrap() * 512
    }

    #[test]
    fn the_structures_are_the_kernels() {
        assert_eq!((std::mem::size_of::<Info>(), std::mem::size_of::<Configuration>()), (232, 304));
    }

    #[test]
    fn a_device_is_found_by_its_file_grows_with_it_and_goes_with_its_last_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backing");
        let backing =
            OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        backing.set_len(1 << 20).unwrap();
        assert!(LoopDevice::find(&backing).unwrap().is_none());

        let device = LoopDevice::attach(&backing, true).unwrap();
        let found = LoopDevice::find(&File::open(&path).unwrap()).unwrap().unwrap();
        assert_eq!(found.path(), device.path());
        assert_eq!(size_of(&device), 1 << 20);
        backing.set_len(3 << 20).unwrap();
        device.refresh_capacity().unwrap();
        assert_eq!(size_of(&device), 3 << 20);

        drop(device);
        assert!(LoopDevice::find(&backing).unwrap().is_some(), "its other user has it still");
        drop(found);
        // A device watcher of the host may look at it for a moment longer.
        while LoopDevice::find(&backing).unwrap().is_some() {
            std::thread::yield_now();
        }
    }
}
