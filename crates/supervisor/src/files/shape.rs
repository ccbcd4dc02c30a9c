//! The shape of a tree: folders, symbolic links, removals. Moves no bytes.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

use harvest_proto::bridge::{Fault, FaultCode, FileRequest, Reply};

use super::place::Place;
use crate::{supervisor::Supervisor, users::User};

/// What is to be done at a path, where it may block.
pub(super) type Work = Box<dyn FnOnce(&Path) -> io::Result<Reply> + Send>;

/// What a request comes to; refused here when its user is unknown.
pub(super) fn work(supervisor: &Supervisor, request: FileRequest) -> Result<Work, Fault> {
    Ok(match request {
        FileRequest::Mkdir { mode, user, .. } => {
            let user = supervisor.user(user.as_deref())?;
            Box::new(move |path| make_folder(path, mode, &user))
        }
        FileRequest::Symlink { target, user, .. } => {
            let user = supervisor.user(user.as_deref())?;
            Box::new(move |path| make_link(path, &target, &user))
        }
        FileRequest::ReadLink { .. } => Box::new(|path| {
            let target = fs::read_link(Place::of(path)?.path())?;
            Ok(Reply::Link { target: target.to_string_lossy().into_owned() })
        }),
        FileRequest::Remove { tree, .. } => Box::new(move |path| remove(path, tree)),
        _ => return Err(Fault::new(FaultCode::Invalid, "this supervisor does not know that request")),
    })
}

fn remove(path: &Path, tree: bool) -> io::Result<Reply> {
    let place = Place::of(path)?;
    match tree && fs::symlink_metadata(place.path())?.is_dir() {
        true => fs::remove_dir_all(place.path())?,
        false => fs::remove_file(place.path())?,
    }
    Ok(Reply::Done)
}

fn make_folder(path: &Path, mode: u32, user: &User) -> io::Result<Reply> {
    let place = Place::of(path)?;
    let path = place.path();
    // Closed to everyone until it belongs to whom it is for.
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(Reply::Done);
        }
        Err(error) => return Err(error),
    }
    std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))?;
    Ok(Reply::Done)
}

fn make_link(path: &Path, target: &str, user: &User) -> io::Result<Reply> {
    let place = Place::of(path)?;
    let path = place.path();
    if fs::symlink_metadata(path).is_ok_and(|about| !about.is_dir()) {
        fs::remove_file(path)?;
    }
    std::os::unix::fs::symlink(target, path)?;
    std::os::unix::fs::lchown(path, Some(user.uid), Some(user.gid))?;
    Ok(Reply::Done)
}
