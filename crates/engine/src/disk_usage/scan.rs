//! Scans the disk usage of a tree that is being written to: file content once per inode, plus a
//! fixed cost per name. Follows no link. Entries that move or vanish during the scan may or may not
//! be counted. Unlinked files are found through the processes that hold them open.

use std::{collections::HashSet, ffi::CString, path::Path};

use rustix::{
    fs::{FileType, Stat},
    io::Errno,
    process::Pid,
};

use crate::tree::{self, DirStack};

/// What each name counts besides its content: a file system has a limited number of inodes.
pub(crate) const NAME_BYTES: u64 = 4096;

/// The usage of the tree below `root`, or of its first `max_names` names.
pub(crate) fn scan_tree(root: &Path, max_names: u64) -> u64 {
    let mut total = ScanTotal::default();
    let Ok(folder) = tree::open_root(root) else { return 0 };
    if let Ok(mut dirs) = DirStack::new(std::os::fd::AsFd::as_fd(&folder)) {
        // A folder that is moved away ends the walk early; the next scan sees the whole tree again.
        let _ = walk(&mut dirs, &mut total, max_names);
    }
    total.bytes
}

/// The usage of unlinked files on these devices that these processes hold open or mapped. Looks at
/// no more than `max_files` of them.
pub(crate) fn scan_unlinked_files(processes: &[Pid], devices: &[u64], max_files: u64) -> u64 {
    let mut total = ScanTotal::default();
    let mut scanned = 0;
    for pid in processes {
        for kind in ["fd", "map_files"] {
            let folder = format!("/proc/{}/{kind}", pid.as_raw_nonzero());
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                scanned += 1;
                if scanned > max_files {
                    return total.bytes;
                }
                let Ok(stat) = rustix::fs::stat(entry.path()) else { continue };
                let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
                if is_file && stat.st_nlink == 0 && devices.contains(&stat.st_dev) {
                    total.add_inode_once(&stat);
                }
            }
        }
    }
    total.bytes
}

#[derive(Default)]
struct ScanTotal {
    bytes: u64,
    names: u64,
    /// Device and inode of files with several names that were counted.
    seen: HashSet<(u64, u64)>,
}

impl ScanTotal {
    fn add_inode_once(&mut self, stat: &Stat) {
        if self.seen.insert((stat.st_dev, stat.st_ino)) {
            self.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        }
    }

    fn add(&mut self, stat: &Stat) {
        self.names += 1;
        self.bytes += NAME_BYTES;
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if stat.st_nlink < 2 || is_folder {
            // `st_blocks` counts units of 512 bytes whatever the file system's block size is.
            self.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        } else {
            self.add_inode_once(stat);
        }
    }
}

fn walk(dirs: &mut DirStack, total: &mut ScanTotal, max_names: u64) -> Result<(), Errno> {
    // `None` means: ascend.
    let mut steps: Vec<Option<CString>> = vec![];
    loop {
        for name in tree::names(dirs.current())? {
            let Ok(stat) = tree::stat(dirs.current(), &name) else { continue };
            total.add(&stat);
            if total.names >= max_names {
                return Ok(());
            }
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                steps.push(Some(name));
            }
        }
        loop {
            match steps.pop() {
                None => return Ok(()),
                Some(None) => dirs.ascend()?,
                Some(Some(name)) => {
                    if dirs.descend(&name).is_ok() {
                        steps.push(None);
                        break;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn scans_count_each_name_and_inode_once() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(scan_tree(folder.path(), u64::MAX), 0);
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        let file = folder.path().join("a/b/file");
        fs::write(&file, vec![7; 1 << 20]).unwrap();
        let one = scan_tree(folder.path(), u64::MAX);
        assert!(one >= (1 << 20) + 3 * NAME_BYTES, "{one}");
        fs::hard_link(&file, folder.path().join("link")).unwrap();
        assert_eq!(scan_tree(folder.path(), u64::MAX), one + NAME_BYTES);
    }

    #[test]
    fn a_scan_stops_at_its_name_limit() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..50 {
            fs::write(folder.path().join(number.to_string()), "").unwrap();
        }
        assert_eq!(scan_tree(folder.path(), 10), 10 * NAME_BYTES);
    }

    #[test]
    fn a_scan_follows_no_links() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", folder.path().join("link")).unwrap();
        assert_eq!(scan_tree(folder.path(), u64::MAX), NAME_BYTES);
    }
}
