//! Removes trees in two steps: a rename into the trash now, the deletion later. Deletion handles
//! untrusted trees: it follows no link and copes with any depth and any names. `gc` decides what to
//! remove.

use std::{
    ffi::{CStr, CString},
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType},
    io::Errno,
};

use crate::{EngineError, btrfs, error::AtPath, records, tree};

// The deepest recursion while deleting; deeper folders are first moved to the top of the trash.
const MAX_OPEN_DEPTH: usize = 64;

/// Moves a tree into the trash, which must be on the same file system. Takes constant time.
pub(crate) fn move_to_trash(path: &Path, trash: &Path) -> Result<(), EngineError> {
    let target = trash.join(records::random_name());
    records::unless_missing(fs::rename(path, &target)).at("remove", path)
}

/// Deletes these trees of the trash. Continues after an error and returns the first one.
pub(crate) fn delete(trash: &Path, names: &[String]) -> Result<(), EngineError> {
    let top = tree::open_root(trash)?;
    let mut result = Ok(());
    let mut waiting: Vec<CString> =
        names.iter().filter_map(|name| CString::new(name.as_str()).ok()).collect();
    while let Some(name) = waiting.pop() {
        let deleted = delete_one(top.as_fd(), top.as_fd(), &name, 0, &mut waiting);
        result = result.and(deleted.at("delete", tree::join(trash, &name)));
    }
    result
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
    moved_up: &mut Vec<CString>,
) -> Result<(), Errno> {
    let stat = match tree::stat(folder, name) {
        Err(Errno::NOENT) => return Ok(()),
        result => result?,
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return ignore_missing(rustix::fs::unlinkat(folder, name, AtFlags::empty()));
    }
    // On other file systems, inode 256 is an ordinary folder.
    if btrfs::is_subvolume(&stat)
        && rustix::fs::fstatfs(folder)?.f_type == libc::BTRFS_SUPER_MAGIC
        && btrfs::destroy(folder, name).is_ok()
    {
        return Ok(());
    }
    if depth >= MAX_OPEN_DEPTH {
        let new_name =
            CString::new(records::random_name()).expect("hexadecimal text has no zero byte");
        rustix::fs::renameat(folder, name, top, &new_name)?;
        moved_up.push(new_name);
        return Ok(());
    }
    let inner = match tree::open_subfolder(folder, name) {
        Err(Errno::NOENT) => return Ok(()),
        result => result?,
    };
    for entry in tree::names(inner.as_fd())? {
        delete_one(top, inner.as_fd(), &entry, depth + 1, moved_up)?;
    }
    ignore_missing(rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR))
}

fn ignore_missing(result: Result<(), Errno>) -> Result<(), Errno> {
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
    fn deleting_follows_no_links_out_of_the_trash() {
        let disk = Disk::temporary();
        let outside = disk.home.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        let tree = disk.home.path().join("tree");
        fs::create_dir_all(tree.join("a")).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        move_to_trash(&tree, &disk.home.trash()).unwrap();
        assert!(!tree.exists());
        delete(&disk.home.trash(), &records::names_in(&disk.home.trash()).unwrap()).unwrap();
        assert!(records::names_in(&disk.home.trash()).unwrap().is_empty());
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn trees_of_any_depth_can_be_deleted() {
        let disk = Disk::temporary();
        // 3,000 levels: more than PATH_MAX and the usual limit of open files allow.
        let mut folder = tree::open_root(&disk.home.trash()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&folder, c"a", rustix::fs::Mode::RWXU).unwrap();
            folder = tree::open_subfolder(folder.as_fd(), c"a").unwrap();
        }
        delete(&disk.home.trash(), &records::names_in(&disk.home.trash()).unwrap()).unwrap();
        assert!(records::names_in(&disk.home.trash()).unwrap().is_empty());
    }

    #[test]
    fn moving_a_missing_tree_to_the_trash_succeeds() {
        let disk = Disk::temporary();
        move_to_trash(&disk.home.path().join("nothing"), &disk.home.trash()).unwrap();
    }
}
