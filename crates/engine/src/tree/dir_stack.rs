//! A cursor that descends into a tree of any depth and back up. It never builds a path, so none can
//! be too long, and keeps only the innermost folders open.

use std::{
    collections::VecDeque,
    ffi::CStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{fs, io::Errno};

use super::{join, open_folder, open_subfolder};

// Deeper than usual trees; two cursors at once stay far below the usual limit of open files.
const MAX_OPEN: usize = 64;

/// The folders from a root to the current one.
pub(crate) struct DirStack {
    /// The innermost folders.
    open: VecDeque<OwnedFd>,
    /// Device and inode of every folder.
    identities: Vec<(u64, u64)>,
}

impl DirStack {
    pub(crate) fn new(root: BorrowedFd<'_>) -> Result<Self, Errno> {
        let root = open_folder(root, Path::new(""))?;
        let identities = vec![identity(root.as_fd())?];
        Ok(Self { open: VecDeque::from([root]), identities })
    }

    /// The current folder.
    pub(crate) fn current(&self) -> BorrowedFd<'_> {
        self.open.back().expect("the current folder stays open").as_fd()
    }

    /// The number of folders on the stack, including the root.
    pub(crate) fn depth(&self) -> usize {
        self.identities.len()
    }

    /// Enters a subfolder of the current folder.
    pub(crate) fn descend(&mut self, name: &CStr) -> Result<(), Errno> {
        let folder = open_folder(self.current(), &join(Path::new(""), name))?;
        self.identities.push(identity(folder.as_fd())?);
        self.open.push_back(folder);
        if self.open.len() > MAX_OPEN {
            self.open.pop_front();
        }
        Ok(())
    }

    /// Returns to the parent folder. Does nothing at the root.
    ///
    /// # Errors
    /// Also when the current folder was moved: its parent is another folder then.
    pub(crate) fn ascend(&mut self) -> Result<(), Errno> {
        if self.identities.len() == 1 {
            return Ok(());
        }
        self.identities.pop();
        if self.open.len() == 1 {
            let above = open_subfolder(self.current(), c"..")?;
            if self.identities.last() != Some(&identity(above.as_fd())?) {
                return Err(Errno::STALE);
            }
            self.open.push_front(above);
        }
        self.open.pop_back();
        Ok(())
    }
}

fn identity(folder: BorrowedFd<'_>) -> Result<(u64, u64), Errno> {
    let stat = fs::fstat(folder)?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::open_root;
    use rustix::fs::Mode;

    const DEPTH: usize = 3 * MAX_OPEN;

    // Names of 100 bytes: the full path is far longer than PATH_MAX.
    fn deep_tree() -> (tempfile::TempDir, DirStack, std::ffi::CString) {
        let folder = tempfile::tempdir().unwrap();
        let name = std::ffi::CString::new("n".repeat(100)).unwrap();
        let root = open_root(folder.path()).unwrap();
        let mut dirs = DirStack::new(root.as_fd()).unwrap();
        for _ in 0..DEPTH {
            fs::mkdirat(dirs.current(), &name, Mode::RWXU).unwrap();
            dirs.descend(&name).unwrap();
        }
        (folder, dirs, name)
    }

    #[test]
    fn ascending_from_any_depth_reaches_the_root() {
        let (folder, mut dirs, _) = deep_tree();
        let root = identity(open_root(folder.path()).unwrap().as_fd()).unwrap();
        assert!(dirs.open.len() <= MAX_OPEN);
        while dirs.depth() > 1 {
            dirs.ascend().unwrap();
        }
        assert_eq!(identity(dirs.current()).unwrap(), root);
        dirs.ascend().unwrap();
        assert_eq!(identity(dirs.current()).unwrap(), root);
    }

    #[test]
    fn ascending_from_a_moved_folder_fails() {
        let (folder, mut dirs, name) = deep_tree();
        let first = folder.path().join(name.to_str().unwrap());
        std::fs::rename(first.join(name.to_str().unwrap()), folder.path().join("elsewhere"))
            .unwrap();
        let result = loop {
            match dirs.ascend() {
                Ok(()) if dirs.depth() == 1 => break Ok(()),
                Ok(()) => {}
                Err(error) => break Err(error),
            }
        };
        assert_eq!(result, Err(Errno::STALE));
    }
}
