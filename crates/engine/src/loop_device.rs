//! Loop devices: a file as a block device. Mounts nothing. All devices have *autoclear* set: the
//! kernel detaches them when the last user closes or unmounts them, even after a crash.

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
const LO_FLAGS_DIRECT_IO: u32 = 16;

// Between asking for a free device and configuring it, another process may take the device.
const MAX_ATTEMPTS: u32 = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
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
struct LoopConfig {
    file: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// An attached loop device. The open file keeps it attached.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    /// Read-only: some kernels refuse to mount a device that is open for writing.
    file: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches `backing`, which must be open for writing, to a free loop device.
    pub(crate) fn attach(backing: &File) -> io::Result<Self> {
        Self::attach_with(backing, LO_FLAGS_AUTOCLEAR)
    }

    /// [`LoopDevice::attach`] without the host's page cache: the file system on the device has its
    /// own, and a flush need not write the host's first. The kernel ignores this where the host's
    /// file system cannot do it.
    pub(crate) fn attach_uncached(backing: &File) -> io::Result<Self> {
        Self::attach_with(backing, LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO)
    }

    fn attach_with(backing: &File, flags: u32) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        let taken = |error: &io::Error| {
            matches!(error.raw_os_error(), Some(libc::EBUSY | libc::ENXIO | libc::ENOENT))
        };
        let mut last = io::Error::from(io::ErrorKind::ResourceBusy);
        for _ in 0..MAX_ATTEMPTS {
            match Self::attach_next(&control, backing, flags) {
                // Another process took the device, or removed it.
                Err(error) if taken(&error) => last = error,
                result => return result,
            }
        }
        Err(last)
    }

    fn attach_next(control: &File, backing: &File, flags: u32) -> io::Result<Self> {
        // SAFETY: this request takes no argument.
        let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let writable = OpenOptions::new().read(true).write(true).open(&path)?;
        // SAFETY: the structure contains only integers, for which zero is valid.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.file =
            u32::try_from(backing.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
        config.info.flags = flags;
        // SAFETY: the kernel reads a `struct loop_config` and keeps no pointer to it.
        check(unsafe { libc::ioctl(writable.as_raw_fd(), LOOP_CONFIGURE, &raw const config) })?;
        // Opened again before `writable` is dropped, or autoclear would detach the device.
        let file = File::open(&path)?;
        drop(writable);
        Ok(Self { file, path })
    }

    /// The device that `backing` is attached to, by any process.
    pub(crate) fn find(backing: &File) -> io::Result<Option<Self>> {
        let metadata = backing.metadata()?;
        for entry in fs::read_dir("/sys/block")? {
            let entry = entry?;
            if !entry.path().join("loop/backing_file").exists() {
                continue;
            }
            let path = Path::new("/dev").join(entry.file_name());
            // The device may be detached meanwhile; an open device with a status stays attached.
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

    /// Updates the device's size after its file has grown.
    pub(crate) fn refresh_capacity(&self) -> io::Result<()> {
        // SAFETY: this request takes no argument.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_CAPACITY, 0) }).map(drop)
    }
}

fn status(device: &File) -> io::Result<LoopInfo> {
    // SAFETY: the structure contains only integers, for which zero is valid.
    let mut info: LoopInfo = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a `struct loop_info64`.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) })?;
    Ok(info)
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    fn size_of(device: &LoopDevice) -> u64 {
        let name = device.path().file_name().unwrap();
        let sectors = fs::read_to_string(Path::new("/sys/block").join(name).join("size")).unwrap();
        sectors.trim().parse::<u64>().unwrap() * 512
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(
            (std::mem::size_of::<LoopInfo>(), std::mem::size_of::<LoopConfig>()),
            (232, 304)
        );
    }

    #[test]
    fn uncached_device_uses_direct_io_if_possible() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backing");
        let backing =
            OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        backing.set_len(1 << 20).unwrap();
        let device = LoopDevice::attach_uncached(&backing).unwrap();
        let flags = status(&device.file).unwrap().flags;
        let open = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
        assert_eq!(flags & LO_FLAGS_DIRECT_IO != 0, open.is_ok());
        assert_ne!(flags & LO_FLAGS_AUTOCLEAR, 0);
    }

    #[test]
    fn autoclear_detaches_the_device_after_its_last_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backing");
        let backing =
            OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        backing.set_len(1 << 20).unwrap();
        assert!(LoopDevice::find(&backing).unwrap().is_none());

        let device = LoopDevice::attach(&backing).unwrap();
        let found = LoopDevice::find(&File::open(&path).unwrap()).unwrap().unwrap();
        assert_eq!(found.path(), device.path());
        assert_eq!(size_of(&device), 1 << 20);
        backing.set_len(3 << 20).unwrap();
        device.refresh_capacity().unwrap();
        assert_eq!(size_of(&device), 3 << 20);

        drop(device);
        assert!(LoopDevice::find(&backing).unwrap().is_some(), "the other user still has it");
        drop(found);
        // udev may hold the device open for a moment longer.
        while LoopDevice::find(&backing).unwrap().is_some() {
            std::thread::yield_now();
        }
    }
}
