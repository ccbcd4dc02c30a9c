//! The few requests of btrfs that have no other way in: subvolumes, their limits, its size. Each is
//! the smallest function that can be called safely; nothing here decides anything.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    io,
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use libc::c_ulong;
use rustix::fs::Stat;

// From <linux/btrfs.h>: direction, size and number of each request in one word.
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

// The inode of every subvolume's top folder.
const TOP: u64 = 256;
const QUOTA_TREE: u64 = 8;
const QGROUP_INFO: u32 = 242;

/// `struct btrfs_ioctl_vol_args_v2`.
#[repr(C)]
struct Volume {
    file: i64,
    transaction: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct Named {
    file: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_search_args` with its key spelt out.
#[repr(C)]
struct Search {
    tree: u64,
    objects: [u64; 2],
    offsets: [u64; 2],
    transactions: [u64; 2],
    kinds: [u32; 2],
    items: u32,
    unused: [u32; 9],
    found: [u8; 4096 - 104],
}

/// What a subvolume takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// All it shows. With simple quotas: all it has allocated and something still refers to.
    pub(crate) referenced: u64,
    /// What would be free without it.
    pub(crate) exclusive: u64,
}

/// Whether a path is on btrfs.
pub(crate) fn is_here(path: &Path) -> io::Result<bool> {
    Ok(rustix::fs::statfs(path)?.f_type == libc::BTRFS_SUPER_MAGIC)
}

/// Whether what `stat` describes, on btrfs, is the top of a subvolume.
pub(crate) fn is_subvolume(stat: &Stat) -> bool {
    stat.st_ino == TOP && stat.st_mode & libc::S_IFMT == libc::S_IFDIR
}

/// Makes an empty subvolume in a folder.
pub(crate) fn create(folder: impl AsFd, name: &CStr) -> io::Result<()> {
    let mut volume = Volume { file: 0, transaction: 0, flags: 0, unused: [0; 4], name: [0; 4040] };
    put(&mut volume.name, name)?;
    // SAFETY: the kernel reads and writes a structure of the size the request says, which it has.
    unsafe { request(folder, SUBVOL_CREATE_V2, &raw mut volume) }
}

/// Makes a copy of the subvolume `source` in a folder, sharing everything. On disk when this returns.
/// It can be written to, even if nobody is to: the kernel would not let one that cannot be renamed.
pub(crate) fn snapshot(source: impl AsFd, folder: impl AsFd, name: &CStr) -> io::Result<()> {
    let file = i64::from(source.as_fd().as_raw_fd());
    let mut volume = Volume { file, transaction: 0, flags: 0, unused: [0; 4], name: [0; 4040] };
    put(&mut volume.name, name)?;
    // SAFETY: as above; `source` stays open until the call returns.
    unsafe { request(folder, SNAP_CREATE_V2, &raw mut volume) }
}

/// Takes a subvolume away. Its blocks come free in the background.
pub(crate) fn destroy(folder: impl AsFd, name: &CStr) -> io::Result<()> {
    let mut volume = Volume { file: 0, transaction: 0, flags: 0, unused: [0; 4], name: [0; 4040] };
    put(&mut volume.name, name)?;
    // SAFETY: as above.
    unsafe { request(folder, SNAP_DESTROY_V2, &raw mut volume) }
}

/// Makes the file system as large as its device has become.
pub(crate) fn grow(anywhere: impl AsFd) -> io::Result<()> {
    let mut named = Named { file: 0, name: [0; 4088] };
    named.name[..3].copy_from_slice(b"max");
    // SAFETY: as above.
    unsafe { request(anywhere, RESIZE, &raw mut named) }
}

/// Writes everything down and has what was deleted come free soon.
pub(crate) fn sync(anywhere: impl AsFd) -> io::Result<()> {
    // SAFETY: the request has no argument.
    unsafe { request(anywhere, SYNC, std::ptr::null_mut::<u8>()) }
}

/// Starts to count what each subvolume takes: by who allocated it where the kernel can (6.7), else by
/// who refers to it, which makes every snapshot several times as slow.
pub(crate) fn enable_quotas(anywhere: impl AsFd) -> io::Result<()> {
    let enable = |how: u64| {
        let mut arguments = [how, 0];
        // SAFETY: the kernel reads and writes two numbers of 64 bits.
        unsafe { request(anywhere.as_fd(), QUOTA_CTL, &raw mut arguments) }
    };
    enable(ENABLE_SIMPLE_QUOTAS).or_else(|_| enable(ENABLE_QGROUPS))
}

/// Limits what an open subvolume may take; its writers get EDQUOT beyond.
pub(crate) fn limit(subvolume: impl AsFd, bytes: u64) -> io::Result<()> {
    // The subvolume itself, which limit, its value, and three that are not set.
    let mut arguments = [0, LIMIT_REFERENCED, bytes, 0, 0, 0];
    // SAFETY: the kernel reads six numbers of 64 bits.
    unsafe { request(subvolume, QGROUP_LIMIT, &raw mut arguments) }
}

/// The number of the subvolume an open file is in.
pub(crate) fn number(file: impl AsFd) -> io::Result<u64> {
    let mut arguments = [0u64; 512];
    arguments[1] = TOP;
    // SAFETY: the kernel reads and writes 4,096 bytes, which the numbers take.
    unsafe { request(file, INO_LOOKUP, &raw mut arguments)? };
    Ok(arguments[0])
}

/// What each subvolume took when its numbers were last written down; none without quotas.
pub(crate) fn taken(anywhere: impl AsFd) -> io::Result<BTreeMap<u64, Taken>> {
    let mut taken = BTreeMap::new();
    let mut from = 0;
    loop {
        let mut search = Search {
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
        match unsafe { request(anywhere.as_fd(), TREE_SEARCH, &raw mut search) } {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(taken),
            result => result?,
        }
        let Some(last) = read_found(&search, &mut taken) else { return Ok(taken) };
        from = last + 1;
    }
}

// Every item has a header of 32 bytes: transaction, object, offset, kind, length.
fn read_found(search: &Search, taken: &mut BTreeMap<u64, Taken>) -> Option<u64> {
    let number =
        |at: usize| Some(u64::from_le_bytes(search.found.get(at..at + 8)?.try_into().ok()?));
    let (mut at, mut last) = (0, None);
    for _ in 0..search.items {
        let (group, sizes) = (number(at + 16)?, number(at + 24)?);
        let (kind, length) = (sizes & 0xffff_ffff, usize::try_from(sizes >> 32).ok()?);
        if kind == u64::from(QGROUP_INFO) {
            let sizes = Taken { referenced: number(at + 40)?, exclusive: number(at + 56)? };
            taken.insert(group, sizes);
        }
        last = Some(group);
        at += 32 + length;
    }
    last
}

fn put(place: &mut [u8], name: &CStr) -> io::Result<()> {
    let bytes = name.to_bytes();
    // One byte of the place is the zero at the end.
    let target = place[..255].get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidFilename)?;
    target.copy_from_slice(bytes);
    Ok(())
}

/// # Safety
/// `argument` must be what the request expects and writable.
unsafe fn request<T>(file: impl AsFd, number: c_ulong, argument: *mut T) -> io::Result<()> {
    // SAFETY: the caller vouches for the argument; the descriptor is borrowed for the call.
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), number, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_are_the_kernels() {
        assert_eq!(size_of::<Volume>(), 4096);
        assert_eq!(size_of::<Named>(), 4096);
        assert_eq!(size_of::<Search>(), 4096);
    }

    #[test]
    fn a_name_too_long_for_the_kernel_is_refused_here() {
        let mut place = [0; 4040];
        let long = std::ffi::CString::new(vec![b'a'; 256]).unwrap();
        assert!(put(&mut place, &long).is_err());
        assert!(put(&mut place, c"disk").is_ok());
    }

    #[test]
    fn what_is_found_beyond_the_buffer_is_not_read() {
        let mut search = Search {
            tree: 0,
            objects: [0; 2],
            offsets: [0; 2],
            transactions: [0; 2],
            kinds: [0; 2],
            items: 1000,
            unused: [0; 9],
            found: [0xff; 4096 - 104],
        };
        assert_eq!(read_found(&search, &mut BTreeMap::new()), None);
        search.items = 0;
        assert_eq!(read_found(&search, &mut BTreeMap::new()), None);
    }
}
