//! Creates folders and symbolic links, and removes files and folders.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt, symlink},
    path::Path,
};

use harvest_proto::bridge::Reply;
use rustix::fs::{Mode, OFlags};

use crate::resolve::ResolvedPath;

pub(super) fn remove(path: &Path, tree: bool) -> io::Result<Reply> {
    let resolved = ResolvedPath::of(path)?;
    match tree && fs::symlink_metadata(resolved.path())?.is_dir() {
        true => fs::remove_dir_all(resolved.path())?,
        false => fs::remove_file(resolved.path())?,
    }
    Ok(Reply::Done)
}

pub(super) fn make_folder(path: &Path, mode: u32) -> io::Result<Reply> {
    let resolved = ResolvedPath::of(path)?;
    let path = resolved.path();
    // Private until the mode is set.
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(Reply::Done);
        }
        Err(error) => return Err(error),
    }
    set_mode(&open_folder(path)?, mode)?;
    Ok(Reply::Done)
}

/// Opens the folder without following links: it may have been replaced by a link.
fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Independent of the umask.
pub(super) fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(mode & 0o7777))
}

pub(super) fn make_link(path: &Path, target: &str) -> io::Result<Reply> {
    let resolved = ResolvedPath::of(path)?;
    let path = resolved.path();
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_dir()) {
        fs::remove_file(path)?;
    }
    symlink(target, path)?;
    Ok(Reply::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_replaced_by_a_link_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::DirBuilder::new().mode(0o700).create(at("private")).unwrap();
        symlink("private", at("new")).unwrap();
        assert!(open_folder(&at("new")).is_err());
        assert_eq!(fs::metadata(at("private")).unwrap().permissions().mode() & 0o7777, 0o700);
        make_folder(&at("made"), 0o2755).unwrap();
        assert_eq!(fs::metadata(at("made")).unwrap().permissions().mode() & 0o7777, 0o2755);
    }
}
