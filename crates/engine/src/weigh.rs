//! Weighs a tree somebody is writing to: what it takes on the disk, each file once, and what its names
//! cost. Follows no link; what moves or vanishes on the way is counted or not, as it happens. Files that
//! have lost their name are found where they are still open.

use std::{collections::HashSet, ffi::CString, path::Path};

use rustix::{
    fs::{FileType, Stat},
    io::Errno,
    process::Pid,
};

use crate::tree::{self, Trail};

/// What a name weighs besides its content: a host has only so many of them.
pub(crate) const NAME_BYTES: u64 = 4096;

/// The weight of what is below `root`, or of its first `most_names` names.
pub(crate) fn weigh(root: &Path, most_names: u64) -> u64 {
    let mut weight = Weight::default();
    let Ok(folder) = tree::open_root(root) else { return 0 };
    if let Ok(mut trail) = Trail::new(std::os::fd::AsFd::as_fd(&folder)) {
        // A folder moved away under our feet ends the walk early; the next one is whole again.
        let _ = walk(&mut trail, &mut weight, most_names);
    }
    weight.bytes
}

/// The weight of files of these devices that have no name any more and that these processes hold open or
/// mapped, or of the first `most` they hold.
pub(crate) fn weigh_nameless(processes: &[Pid], devices: &[u64], most: u64) -> u64 {
    let mut weight = Weight::default();
    let mut looked_at = 0;
    for pid in processes {
        for kind in ["fd", "map_files"] {
            let folder = format!("/proc/{}/{kind}", pid.as_raw_nonzero());
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                looked_at += 1;
                if looked_at > most {
                    return weight.bytes;
                }
                let Ok(stat) = rustix::fs::stat(entry.path()) else { continue };
                let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
                if is_file && stat.st_nlink == 0 && devices.contains(&stat.st_dev) {
                    weight.add_once(&stat);
                }
            }
        }
    }
    weight.bytes
}

#[derive(Default)]
struct Weight {
    bytes: u64,
    names: u64,
    /// Files with several names that have been seen.
    seen: HashSet<(u64, u64)>,
}

impl Weight {
    fn add_once(&mut self, stat: &Stat) {
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
            self.add_once(stat);
        }
    }
}

fn walk(trail: &mut Trail, weight: &mut Weight, most_names: u64) -> Result<(), Errno> {
    // `None` stands for the way back up.
    let mut steps: Vec<Option<CString>> = vec![];
    loop {
        for name in tree::names(trail.here())? {
            let Ok(stat) = tree::stat(trail.here(), &name) else { continue };
            weight.add(&stat);
            if weight.names >= most_names {
                return Ok(());
            }
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                steps.push(Some(name));
            }
        }
        loop {
            match steps.pop() {
                None => return Ok(()),
                Some(None) => trail.up()?,
                Some(Some(name)) => {
                    if trail.down(&name).is_ok() {
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
    fn content_and_names_weigh_and_a_file_with_two_names_weighs_once() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(weigh(folder.path(), u64::MAX), 0);
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        let file = folder.path().join("a/b/file");
        fs::write(&file, vec![7; 1 << 20]).unwrap();
        let one = weigh(folder.path(), u64::MAX);
        assert!(one >= (1 << 20) + 3 * NAME_BYTES, "{one}");
        fs::hard_link(&file, folder.path().join("link")).unwrap();
        assert_eq!(weigh(folder.path(), u64::MAX), one + NAME_BYTES);
    }

    #[test]
    fn a_walk_has_an_end_however_many_names_there_are() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..50 {
            fs::write(folder.path().join(number.to_string()), "").unwrap();
        }
        assert_eq!(weigh(folder.path(), 10), 10 * NAME_BYTES);
    }

    #[test]
    fn no_link_leads_the_walk_out() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", folder.path().join("link")).unwrap();
        assert_eq!(weigh(folder.path(), u64::MAX), NAME_BYTES);
    }
}
