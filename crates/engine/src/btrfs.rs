//! Safe wrappers for the btrfs ioctls that the engine uses: subvolumes, quotas, resizing. No
//! policy.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    io,
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use libc::c_ulong;
use rustix::fs::Stat;

// Request numbers from <linux/btrfs.h>.
const SNAP_CREATE_V2: c_ulong = 0x5000_9417;
const SUBVOL_CREATE_V2: c_ulong = 0x5000_9418;
const SNAP_DESTROY_V2: c_ulong = 0x5000_943f;
const RESIZE: c_ulong = 0x5000_9403;
const SYNC: c_ulong = 0x9408;
const QUOTA_CTL: c_ulong = 0xc010_9428;
const QGROUP_LIMIT: c_ulong = 0x8030_942b;
const INO_LOOKUP: c_ulong = 0xd000_9412;
const TREE_SEARCH: c_ulong = 0xd000_9411;

const ENABLE_QGROUPS: u64 = 1;
const ENABLE_SIMPLE_QUOTAS: u64 = 4;
const LIMIT_REFERENCED: u64 = 1;

// The inode of every subvolume's root folder.
const TOP_INODE: u64 = 256;
const QUOTA_TREE: u64 = 8;
const QGROUP_INFO: u32 = 242;

/// `struct btrfs_ioctl_vol_args_v2`.
#[repr(C)]
struct VolArgsV2 {
    file: i64,
    transaction: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

impl VolArgsV2 {
    fn new(file: i64, name: &CStr) -> io::Result<Self> {
        let mut field = [0; 4040];
        write_name(&mut field, name)?;
        Ok(Self { file, transaction: 0, flags: 0, unused: [0; 4], name: field })
    }
}

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct VolArgs {
    file: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_search_args` with its key inlined.
#[repr(C)]
struct SearchArgs {
    tree: u64,
    objects: [u64; 2],
    offsets: [u64; 2],
    transactions: [u64; 2],
    kinds: [u32; 2],
    items: u32,
    unused: [u32; 9],
    found: [u8; 4096 - 104],
}

/// The disk usage of a subvolume's quota group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct QgroupUsage {
    /// Bytes the subvolume refers to; with simple quotas, bytes it allocated that are still in use.
    pub(crate) referenced: u64,
    /// Bytes that would be freed with the subvolume.
    pub(crate) exclusive: u64,
}

/// Whether a path is on btrfs.
pub(crate) fn is_btrfs(path: &Path) -> io::Result<bool> {
    Ok(rustix::fs::statfs(path)?.f_type == libc::BTRFS_SUPER_MAGIC)
}

/// Whether a file on btrfs is the root folder of a subvolume.
pub(crate) fn is_subvolume(stat: &Stat) -> bool {
    stat.st_ino == TOP_INODE && stat.st_mode & libc::S_IFMT == libc::S_IFDIR
}

/// Creates an empty subvolume in a folder.
pub(crate) fn create(folder: impl AsFd, name: &CStr) -> io::Result<()> {
    let mut arguments = VolArgsV2::new(0, name)?;
    // SAFETY: the structure has the size that the request number encodes.
    unsafe { ioctl(folder, SUBVOL_CREATE_V2, &raw mut arguments) }
}

/// Creates a snapshot of the subvolume `source` in a folder. Durable when this returns. Writable,
/// because the kernel does not rename read-only subvolumes.
pub(crate) fn snapshot(source: impl AsFd, folder: impl AsFd, name: &CStr) -> io::Result<()> {
    let mut arguments = VolArgsV2::new(source.as_fd().as_raw_fd().into(), name)?;
    // SAFETY: as above; `source` stays open until the call returns.
    unsafe { ioctl(folder, SNAP_CREATE_V2, &raw mut arguments) }
}

/// Deletes a subvolume. The kernel frees its blocks in the background.
pub(crate) fn destroy(folder: impl AsFd, name: &CStr) -> io::Result<()> {
    let mut arguments = VolArgsV2::new(0, name)?;
    // SAFETY: as above.
    unsafe { ioctl(folder, SNAP_DESTROY_V2, &raw mut arguments) }
}

/// Grows the file system to the size of its device. `anywhere` is an open file on it.
pub(crate) fn resize_to_device(anywhere: impl AsFd) -> io::Result<()> {
    let mut arguments = VolArgs { file: 0, name: [0; 4088] };
    arguments.name[..3].copy_from_slice(b"max");
    // SAFETY: as above.
    unsafe { ioctl(anywhere, RESIZE, &raw mut arguments) }
}

/// Commits all writes and starts freeing deleted subvolumes.
pub(crate) fn sync(anywhere: impl AsFd) -> io::Result<()> {
    // SAFETY: the request has no argument.
    unsafe { ioctl(anywhere, SYNC, std::ptr::null_mut::<u8>()) }
}

/// Enables quota accounting: simple quotas where the kernel has them (6.7), else qgroups, which
/// make every snapshot several times slower.
pub(crate) fn enable_quotas(anywhere: impl AsFd) -> io::Result<()> {
    let enable = |mode: u64| {
        let mut arguments = [mode, 0];
        // SAFETY: the kernel reads and writes two 64-bit numbers.
        unsafe { ioctl(anywhere.as_fd(), QUOTA_CTL, &raw mut arguments) }
    };
    enable(ENABLE_SIMPLE_QUOTAS).or_else(|_| enable(ENABLE_QGROUPS))
}

/// Limits the size of an open subvolume; writers get EDQUOT beyond it.
pub(crate) fn limit(subvolume: impl AsFd, bytes: u64) -> io::Result<()> {
    // qgroup 0 (the subvolume's own), the kind of limit, its value, and three unset limits.
    let mut arguments = [0, LIMIT_REFERENCED, bytes, 0, 0, 0];
    // SAFETY: the kernel reads six 64-bit numbers.
    unsafe { ioctl(subvolume, QGROUP_LIMIT, &raw mut arguments) }
}

/// The id of the subvolume that contains an open file.
pub(crate) fn subvolume_id(file: impl AsFd) -> io::Result<u64> {
    let mut arguments = [0u64; 512];
    arguments[1] = TOP_INODE;
    // SAFETY: the kernel reads and writes 4,096 bytes, the size of the array.
    unsafe { ioctl(file, INO_LOOKUP, &raw mut arguments)? };
    Ok(arguments[0])
}

/// The usage of each subvolume by id, as of the last commit; empty without quotas.
pub(crate) fn qgroup_usages(anywhere: impl AsFd) -> io::Result<BTreeMap<u64, QgroupUsage>> {
    let mut taken = BTreeMap::new();
    let mut from = 0;
    loop {
        let mut search = SearchArgs {
            tree: QUOTA_TREE,
            objects: [0, 0],
            offsets: [from, u64::MAX],
            transactions: [0, u64::MAX],
            kinds: [QGROUP_INFO; 2],
            items: u32::MAX,
            unused: [0; 9],
            found: [0; 4096 - 104],
        };
        // SAFETY: the kernel reads and writes 4,096 bytes, the size of the structure.
        match unsafe { ioctl(anywhere.as_fd(), TREE_SEARCH, &raw mut search) } {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(taken),
            result => result?,
        }
        let Some(last) = read_items(&search, &mut taken) else { return Ok(taken) };
        from = last + 1;
    }
}

// Each item has a header of 32 bytes: transaction, object, offset, type, length.
fn read_items(search: &SearchArgs, taken: &mut BTreeMap<u64, QgroupUsage>) -> Option<u64> {
    let number =
        |at: usize| Some(u64::from_le_bytes(search.found.get(at..at + 8)?.try_into().ok()?));
    let (mut at, mut last) = (0, None);
    for _ in 0..search.items {
        let (group, sizes) = (number(at + 16)?, number(at + 24)?);
        let (kind, length) = (sizes & 0xffff_ffff, usize::try_from(sizes >> 32).ok()?);
        if kind == u64::from(QGROUP_INFO) {
            let sizes = QgroupUsage { referenced: number(at + 40)?, exclusive: number(at + 56)? };
            taken.insert(group, sizes);
        }
        last = Some(group);
        at += 32 + length;
    }
    last
}

fn write_name(field: &mut [u8], name: &CStr) -> io::Result<()> {
    let bytes = name.to_bytes();
    // At most 255 bytes, followed by the terminating zero.
    let target = field[..255].get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidFilename)?;
    target.copy_from_slice(bytes);
    Ok(())
}

/// # Safety
/// `argument` must point to the structure that the request expects, and be writable.
unsafe fn ioctl<T>(file: impl AsFd, number: c_ulong, argument: *mut T) -> io::Result<()> {
    // SAFETY: the caller guarantees the argument; the descriptor is borrowed for the call.
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), number, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<VolArgsV2>(), 4096);
        assert_eq!(size_of::<VolArgs>(), 4096);
        assert_eq!(size_of::<SearchArgs>(), 4096);
    }

    #[test]
    fn names_over_255_bytes_are_refused() {
        let mut place = [0; 4040];
        let long = std::ffi::CString::new(vec![b'a'; 256]).unwrap();
        assert!(write_name(&mut place, &long).is_err());
        assert!(write_name(&mut place, c"disk").is_ok());
    }

    #[test]
    fn items_beyond_the_buffer_are_not_read() {
        let mut search = SearchArgs {
            tree: 0,
            objects: [0; 2],
            offsets: [0; 2],
            transactions: [0; 2],
            kinds: [0; 2],
            items: 1000,
            unused: [0; 9],
            found: [0xff; 4096 - 104],
        };
        assert_eq!(read_items(&search, &mut BTreeMap::new()), None);
        search.items = 0;
        assert_eq!(read_items(&search, &mut BTreeMap::new()), None);
    }
}
