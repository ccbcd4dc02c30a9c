//! The `copy` step: copies files of the host into a layer, without running anything. Reads the
//! layers below only to give the target's parent folders the owner and mode they have there.

use std::{
    ffi::{CString, OsStr},
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path, PathBuf},
};

use harvest_engine::{copy_tree, tree};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid},
    io::Errno,
};

use crate::{ImageError, unpack::lookup_folders};

/// Copies `source` to the path `to` in the empty folder `layer`, a new layer on top of `below` (top
/// first). The copy belongs to root.
pub(crate) fn copy_into(
    layer: &Path,
    below: &[PathBuf],
    source: &Path,
    to: &Path,
) -> Result<(), ImageError> {
    let is_folder =
        fs::symlink_metadata(source).map_err(|e| ImageError::file("read", source, e))?.is_dir();
    let folder = if is_folder { to } else { to.parent().unwrap_or(Path::new("/")) };
    let inside = create_folders(layer, below, folder)?;
    let target = layer.join(&inside);
    if is_folder {
        copy_tree(source, &target)?;
    } else {
        copy_file(source, &target, to.file_name().unwrap_or_default())?;
    }
    // Parent folders of the target keep the owner they have below; everything in it is new.
    tree::visit(&target, &mut |path, parent, _| {
        give_to_root(parent, path.file_name().unwrap_or_default())
            .map_err(|e| ImageError::file("change the owner of", target.join(path), e))
    })
}

fn copy_file(source: &Path, folder: &Path, name: &OsStr) -> Result<(), ImageError> {
    let from = tree::open_root(source.parent().unwrap_or(Path::new("/")))?;
    let into = tree::open_root(folder)?;
    let failed = |e: Errno| ImageError::file("copy", source, e);
    let old = CString::new(source.file_name().unwrap_or_default().as_bytes())
        .map_err(|_| failed(Errno::INVAL))?;
    let stat = tree::stat(from.as_fd(), &old).map_err(failed)?;
    tree::copy_one(from.as_fd(), &old, &stat, into.as_fd())?;
    rustix::fs::renameat(&into, &old, &into, name).map_err(failed)
}

fn give_to_root(folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::chownat(folder, name, Some(Uid::ROOT), Some(Gid::ROOT), AtFlags::SYMLINK_NOFOLLOW)
}

// Creates `path` and its parents in the layer, with the metadata they have in the layers below.
fn create_folders(layer: &Path, below: &[PathBuf], path: &Path) -> Result<PathBuf, ImageError> {
    let mut visible = Vec::new();
    for root in below {
        visible.push(tree::open_root(root)?);
    }
    copy_metadata(layer, visible.first())?;
    let mut made = PathBuf::new();
    for part in path.components() {
        let Component::Normal(part) = part else { continue };
        made.push(part);
        let name = CString::new(part.as_bytes())
            .map_err(|_| ImageError::file("create", path, Errno::INVAL))?;
        visible = match lookup_folders(&visible, &name)
            .map_err(|e| ImageError::file("read", &made, e))?
        {
            Some(folders) => folders,
            None => {
                let reason =
                    io::Error::new(io::ErrorKind::NotADirectory, "the image has no folder there");
                return Err(ImageError::file("copy into", Path::new("/").join(&made), reason));
            }
        };
        let folder = layer.join(&made);
        fs::create_dir(&folder).map_err(|e| ImageError::file("create", &folder, e))?;
        copy_metadata(&folder, visible.first())?;
    }
    Ok(made)
}

fn copy_metadata(folder: &Path, like: Option<&OwnedFd>) -> Result<(), ImageError> {
    let set = || -> Result<(), Errno> {
        let made = tree::open_root(folder).map_err(|_| Errno::IO)?;
        match like {
            Some(like) => {
                tree::copy_file_metadata(like.as_fd(), made.as_fd(), &rustix::fs::fstat(like)?)
            }
            None => rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755)),
        }
    };
    set().map_err(|e| ImageError::file("create", folder, e))
}

/// Opens a file of the layers `below` (top first). Follows no symlink.
pub(crate) fn open_file(below: &[PathBuf], path: &Path) -> Option<File> {
    let mut visible =
        below.iter().map(|root| tree::open_root(root).ok()).collect::<Option<Vec<_>>>()?;
    let parts: Vec<CString> = path
        .components()
        .map(|part| CString::new(part.as_os_str().as_bytes()).ok())
        .collect::<Option<_>>()?;
    let (last, folders) = parts.split_last()?;
    for name in folders {
        visible = lookup_folders(&visible, name).ok()??;
    }
    let found = |folder| Some((folder, tree::stat(AsFd::as_fd(folder), last).ok()?));
    let (folder, stat) = visible.iter().find_map(found)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Some(rustix::fs::openat(folder, last, flags, Mode::empty()).ok()?.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use super::*;

    struct Case {
        folder: tempfile::TempDir,
    }

    impl Case {
        fn new() -> Self {
            let case = Self { folder: tempfile::tempdir().unwrap() };
            for name in ["base", "layer", "source/sub"] {
                fs::create_dir_all(case.at(name)).unwrap();
            }
            fs::write(case.at("source/sub/file"), "text").unwrap();
            chown(case.at("source/sub/file"), Some(1234), Some(1234)).unwrap();
            case
        }

        fn at(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn copy(&self, from: &str, to: &str) -> Result<(), ImageError> {
            copy_into(&self.at("layer"), &[self.at("base")], &self.at(from), Path::new(to))
        }
    }

    #[test]
    fn parent_folders_keep_their_owner_and_mode() {
        let case = Case::new();
        fs::create_dir_all(case.at("base/home/user")).unwrap();
        fs::set_permissions(case.at("base/home/user"), fs::Permissions::from_mode(0o700)).unwrap();
        chown(case.at("base/home/user"), Some(10001), Some(10001)).unwrap();
        case.copy("source", "/home/user/.config/app").unwrap();
        let meta = fs::metadata(case.at("layer/home/user")).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o777), (10001, 0o700));
        let file = fs::metadata(case.at("layer/home/user/.config/app/sub/file")).unwrap();
        assert_eq!(file.uid(), 0);
    }

    #[test]
    fn file_is_copied_under_the_target_name() {
        let case = Case::new();
        case.copy("source/sub/file", "/etc/name").unwrap();
        assert_eq!(fs::read(case.at("layer/etc/name")).unwrap(), b"text");
        assert_eq!(fs::metadata(case.at("layer/etc/name")).unwrap().uid(), 0);
    }

    #[test]
    fn copy_through_a_symlink_is_refused() {
        let case = Case::new();
        symlink("/", case.at("base/etc")).unwrap();
        assert!(case.copy("source", "/etc/x").is_err());
    }

    #[test]
    fn files_behind_a_whiteout_are_not_found() {
        let case = Case::new();
        fs::create_dir_all(case.at("base/etc/apt")).unwrap();
        fs::write(case.at("base/etc/apt/list"), "").unwrap();
        let below = [case.at("layer"), case.at("base")];
        assert!(open_file(&below, Path::new("etc/apt/list")).is_some());
        let layer = tree::open_root(&case.at("layer")).unwrap();
        tree::make_whiteout(layer.as_fd(), c"etc").unwrap();
        assert!(open_file(&below, Path::new("etc/apt/list")).is_none());
    }
}
