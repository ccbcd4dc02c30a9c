//! Creates folders and symbolic links, reads links, and removes files and folders.

use std::{fs, io, os::unix::fs::DirBuilderExt, path::Path};

use harvest_proto::bridge::{Fault, FileRequest, Reply};
use rustix::fs::{Gid, Mode, OFlags, Uid};

use crate::resolve::ResolvedPath;
use crate::{sandbox::Sandbox, users::User};

/// A blocking operation on a path.
pub(super) type TreeOperation = Box<dyn FnOnce(&Path) -> io::Result<Reply> + Send>;

/// The operation of a request; fails when its user is unknown.
pub(super) fn operation(sandbox: &Sandbox, request: FileRequest) -> Result<TreeOperation, Fault> {
    Ok(match request {
        FileRequest::Mkdir { mode, user, .. } => {
            let user = sandbox.user(user.as_deref())?;
            Box::new(move |path| make_folder(path, mode, &user))
        }
        FileRequest::Symlink { target, user, .. } => {
            let user = sandbox.user(user.as_deref())?;
            Box::new(move |path| make_link(path, &target, &user))
        }
        FileRequest::ReadLink { .. } => Box::new(|path| {
            let target = fs::read_link(ResolvedPath::of(path)?.path())?;
            Ok(Reply::Link { target: target.to_string_lossy().into_owned() })
        }),
        FileRequest::Remove { tree, .. } => Box::new(move |path| remove(path, tree)),
        FileRequest::Read { .. }
        | FileRequest::Write { .. }
        | FileRequest::Stat { .. }
        | FileRequest::List { .. } => unreachable!("handled by the caller"),
    })
}

fn remove(path: &Path, tree: bool) -> io::Result<Reply> {
    let resolved = ResolvedPath::of(path)?;
    match tree && fs::symlink_metadata(resolved.path())?.is_dir() {
        true => fs::remove_dir_all(resolved.path())?,
        false => fs::remove_file(resolved.path())?,
    }
    Ok(Reply::Done)
}

fn make_folder(path: &Path, mode: u32, user: &User) -> io::Result<Reply> {
    let resolved = ResolvedPath::of(path)?;
    let path = resolved.path();
    // Private until owner and mode are set.
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(Reply::Done);
        }
        Err(error) => return Err(error),
    }
    set_owner_and_mode(path, mode, user)?;
    Ok(Reply::Done)
}

/// Works on the opened folder without following links: it may have been replaced by a link.
fn set_owner_and_mode(path: &Path, mode: u32, user: &User) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty())?;
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    rustix::fs::fchown(&folder, Some(uid), Some(gid))?;
    // After chown, which clears the set-id bits.
    rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode & 0o7777))?;
    Ok(())
}

fn make_link(path: &Path, target: &str, user: &User) -> io::Result<Reply> {
    let resolved = ResolvedPath::of(path)?;
    let path = resolved.path();
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_dir()) {
        fs::remove_file(path)?;
    }
    std::os::unix::fs::symlink(target, path)?;
    std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid))?;
    Ok(Reply::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn folder_replaced_by_a_link_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let user = crate::users::find("root").unwrap();
        fs::DirBuilder::new().mode(0o700).create(at("private")).unwrap();
        std::os::unix::fs::symlink("private", at("new")).unwrap();
        assert!(set_owner_and_mode(&at("new"), 0o777, &user).is_err());
        assert_eq!(fs::metadata(at("private")).unwrap().permissions().mode() & 0o7777, 0o700);
        make_folder(&at("made"), 0o2755, &user).unwrap();
        let created = fs::metadata(at("made")).unwrap();
        assert_eq!((created.mode() & 0o7777, created.uid()), (0o2755, user.uid));
    }
}
