//! The shape of a tree: folders, symbolic links, removals. Moves no bytes.

use std::{fs, io, os::unix::fs::DirBuilderExt, path::Path};

use harvest_proto::bridge::{Fault, FaultCode, FileRequest, Reply};
use rustix::fs::{Gid, Mode, OFlags, Uid};

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
        _ => {
            return Err(Fault::new(
                FaultCode::Invalid,
                "this supervisor does not know that request",
            ));
        }
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
    give(path, mode, user)?;
    Ok(Reply::Done)
}

/// The folder becomes theirs: the folder itself, held open, for whoever works beside it may have put a link
/// in its place.
fn give(path: &Path, mode: u32, user: &User) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty())?;
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    rustix::fs::fchown(&folder, Some(uid), Some(gid))?;
    // After the owner, which clears the set-id bits.
    rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode & 0o7777))?;
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn a_link_put_in_the_place_of_a_new_folder_leads_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let user = crate::users::find("root").unwrap();
        fs::DirBuilder::new().mode(0o700).create(at("private")).unwrap();
        std::os::unix::fs::symlink("private", at("new")).unwrap();
        assert!(give(&at("new"), 0o777, &user).is_err());
        assert_eq!(fs::metadata(at("private")).unwrap().permissions().mode() & 0o7777, 0o700);
        make_folder(&at("made"), 0o2755, &user).unwrap();
        let made = fs::metadata(at("made")).unwrap();
        assert_eq!((made.mode() & 0o7777, made.uid()), (0o2755, user.uid));
    }
}
