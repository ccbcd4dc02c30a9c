//! Throwing trees away: a rename now, the deleting later. Deleting walks hostile trees, so it follows
//! no link and neither depth nor names can stop it. Decides nothing about what may go; see `collect`.

use std::{
    ffi::{CStr, CString},
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
};

use crate::{
    EngineError, btrfs,
    disk::{self, disk_error},
    tree,
};

// How many folders are open at once while deleting; what lies deeper is first lifted to the top.
const DEEPEST: usize = 64;

/// Moves a tree into the trash, which must be on the same file system: O(1).
pub(crate) fn throw_away(path: &Path, trash: &Path) -> Result<(), EngineError> {
    let target = trash.join(disk::random_name());
    match fs::rename(path, &target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(disk_error("throw away", path, error))
        }
        _ => Ok(()),
    }
}

/// Deletes these trees of the trash. One that cannot be deleted does not keep the others; the first
/// error is told at the end.
pub(crate) fn delete(trash: &Path, names: &[String]) -> Result<(), EngineError> {
    let top = tree::open_root(trash)?;
    let mut told = Ok(());
    let mut waiting: Vec<CString> =
        names.iter().filter_map(|name| CString::new(name.as_str()).ok()).collect();
    while let Some(name) = waiting.pop() {
        if let Err(error) = delete_one(top.as_fd(), top.as_fd(), &name, 0, &mut waiting) {
            told = told.and(Err(disk_error("delete", tree::join(trash, &name), error)));
        }
    }
    told
}

/// Deletes one tree in an open folder.
pub(crate) fn delete_in(folder: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    let mut waiting = vec![name.to_owned()];
    while let Some(name) = waiting.pop() {
        delete_one(folder, folder, &name, 0, &mut waiting)?;
    }
    Ok(())
}

fn delete_one(
    top: BorrowedFd<'_>,
    folder: BorrowedFd<'_>,
    name: &CStr,
    depth: usize,
    lifted: &mut Vec<CString>,
) -> Result<(), Errno> {
    let stat = match tree::stat(folder, name) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error),
    };
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::Directory {
        return gone(rustix::fs::unlinkat(folder, name, AtFlags::empty()));
    }
    // On other file systems the number is an ordinary one.
    if btrfs::is_subvolume(&stat)
        && rustix::fs::fstatfs(folder)?.f_type == libc::BTRFS_SUPER_MAGIC
        && btrfs::destroy(folder, name).is_ok()
    {
        return Ok(());
    }
    if depth >= DEEPEST {
        let above = CString::new(disk::random_name()).expect("hexadecimal text has no zero byte");
        rustix::fs::renameat(folder, name, top, &above)?;
        lifted.push(above);
        return Ok(());
    }
    let inner = match open(folder, name) {
        Ok(inner) => inner,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in tree::names(inner.as_fd())? {
        delete_one(top, inner.as_fd(), &entry, depth + 1, lifted)?;
    }
    gone(rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR))
}

fn open(folder: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    rustix::fs::openat(folder, name, flags, Mode::empty())
}

fn gone(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk;

    #[test]
    fn emptying_follows_no_link_out_of_the_trash() {
        let disk = Disk::temporary();
        let outside = disk.home().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        let tree = disk.home().join("tree");
        fs::create_dir_all(tree.join("a")).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        throw_away(&tree, &disk.trash()).unwrap();
        assert!(!tree.exists());
        delete(&disk.trash(), &disk::names_in(&disk.trash()).unwrap()).unwrap();
        assert!(disk::names_in(&disk.trash()).unwrap().is_empty());
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn a_tree_of_any_depth_can_be_deleted() {
        let disk = Disk::temporary();
        // 3,000 levels: deeper than any path and than the usual limit of open files.
        let mut folder = tree::open_root(&disk.trash()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&folder, c"a", Mode::RWXU).unwrap();
            folder = open(folder.as_fd(), c"a").unwrap();
        }
        delete(&disk.trash(), &disk::names_in(&disk.trash()).unwrap()).unwrap();
        assert!(disk::names_in(&disk.trash()).unwrap().is_empty());
    }

    #[test]
    fn throwing_away_what_is_gone_is_no_error() {
        let disk = Disk::temporary();
        throw_away(&disk.home().join("nothing"), &disk.trash()).unwrap();
    }
}
