//! A way down a tree and back up again, however deep: no path is ever put together, so none can be
//! too long, and of a long way only the last folders stay open.

use std::{
    collections::VecDeque,
    ffi::{CStr, OsStr},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{self, Mode, OFlags},
    io::Errno,
};

use super::open_folder;

// Deeper than honest trees go; two trails at once stay far below the usual limit of open files.
const KEPT_OPEN: usize = 64;

/// The folders from a root to where we are.
pub(crate) struct Trail {
    /// The last of them.
    open: VecDeque<OwnedFd>,
    /// Device and inode of each.
    way: Vec<(u64, u64)>,
}

impl Trail {
    /// Begins at `root`.
    pub(crate) fn new(root: BorrowedFd<'_>) -> Result<Self, Errno> {
        let root = open_folder(root, Path::new(""))?;
        let way = vec![identity(root.as_fd())?];
        Ok(Self { open: VecDeque::from([root]), way })
    }

    /// Where we are.
    pub(crate) fn here(&self) -> BorrowedFd<'_> {
        self.open.back().expect("the folder we are in stays open").as_fd()
    }

    /// How many folders we are in, the root included.
    pub(crate) fn depth(&self) -> usize {
        self.way.len()
    }

    /// Enters a folder of this one.
    pub(crate) fn down(&mut self, name: &CStr) -> Result<(), Errno> {
        let folder = open_folder(self.here(), Path::new(OsStr::from_bytes(name.to_bytes())))?;
        self.way.push(identity(folder.as_fd())?);
        self.open.push_back(folder);
        if self.open.len() > KEPT_OPEN {
            self.open.pop_front();
        }
        Ok(())
    }

    /// Leaves this folder for the one above; at the root it stays where it is.
    ///
    /// # Errors
    /// Also when somebody has moved this folder: what lies above it is not where we came from.
    pub(crate) fn up(&mut self) -> Result<(), Errno> {
        if self.way.len() == 1 {
            return Ok(());
        }
        self.way.pop();
        if self.open.len() == 1 {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
            let above = fs::openat(self.here(), c"..", flags, Mode::empty())?;
            if self.way.last() != Some(&identity(above.as_fd())?) {
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

    const DEPTH: usize = 3 * KEPT_OPEN;

    // Names of 100 bytes: far longer than any path may be.
    fn dug() -> (tempfile::TempDir, Trail, std::ffi::CString) {
        let folder = tempfile::tempdir().unwrap();
        let name = std::ffi::CString::new("n".repeat(100)).unwrap();
        let root = open_root(folder.path()).unwrap();
        let mut trail = Trail::new(root.as_fd()).unwrap();
        for _ in 0..DEPTH {
            fs::mkdirat(trail.here(), &name, Mode::RWXU).unwrap();
            trail.down(&name).unwrap();
        }
        (folder, trail, name)
    }

    #[test]
    fn a_way_of_any_length_leads_back_to_its_root() {
        let (folder, mut trail, _) = dug();
        let root = identity(open_root(folder.path()).unwrap().as_fd()).unwrap();
        assert!(trail.open.len() <= KEPT_OPEN);
        while trail.depth() > 1 {
            trail.up().unwrap();
        }
        assert_eq!(identity(trail.here()).unwrap(), root);
        trail.up().unwrap();
        assert_eq!(identity(trail.here()).unwrap(), root);
    }

    #[test]
    fn a_folder_moved_meanwhile_does_not_lead_elsewhere() {
        let (folder, mut trail, name) = dug();
        let first = folder.path().join(name.to_str().unwrap());
        std::fs::rename(first.join(name.to_str().unwrap()), folder.path().join("elsewhere"))
            .unwrap();
        let told = loop {
            match trail.up() {
                Ok(()) if trail.depth() == 1 => break Ok(()),
                Ok(()) => {}
                Err(error) => break Err(error),
            }
        };
        assert_eq!(told, Err(Errno::STALE));
    }
}
