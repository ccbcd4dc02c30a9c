//! The names and types that an unpacked backup may have. The next steps run as root and act on
//! names in the home: they start the program `supervisor`, mount `store.btrfs`, rename layers and
//! follow symlinks. The content of layers is not checked; only sandboxes read it.

use std::{
    fs::{self, DirEntry},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use harvest_engine::LayerId;

use super::{ABOUT, FILES, FOLDERS, IMAGE_LAYERS, LAYERS, SETTINGS, SNAPSHOTS};
use crate::database;

/// The path of a member that no backup has, if there is one.
pub(super) fn find_foreign(home: &Path) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(home)? {
        let entry = entry?;
        let path = entry.path();
        let is_folder = entry.file_type()?.is_dir();
        let foreign = match entry.file_name().to_str() {
            Some(ABOUT | SETTINGS | database::OWN_FILE) => foreign_file(&entry)?,
            Some(name) if FILES.contains(&name) => foreign_file(&entry)?,
            Some(LAYERS | IMAGE_LAYERS) if is_folder => foreign_layer(&path)?,
            Some(SNAPSHOTS) if is_folder => foreign_below(path)?,
            Some(name) if is_folder && FOLDERS.contains(&name) => foreign_below(path)?,
            _ => Some(path),
        };
        if foreign.is_some() {
            return Ok(foreign);
        }
    }
    Ok(None)
}

/// The path of an entry that is no regular file with a single name. A second name could be in a
/// layer, where a sandbox reads it.
fn foreign_file(entry: &DirEntry) -> io::Result<Option<PathBuf>> {
    // Follows no symlink.
    let metadata = entry.metadata()?;
    let is_plain = metadata.is_file() && metadata.nlink() == 1;
    Ok((!is_plain).then(|| entry.path()))
}

/// The path of an entry that is no folder with the name of a layer.
fn foreign_layer(folder: &Path) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_id = entry.file_name().to_str().is_some_and(|name| name.parse::<LayerId>().is_ok());
        if !is_id || !entry.file_type()?.is_dir() {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// The path of anything below a folder that is neither folder nor file.
fn foreign_below(folder: PathBuf) -> io::Result<Option<PathBuf>> {
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else if let Some(foreign) = foreign_file(&entry)? {
                return Ok(Some(foreign));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A home with everything that a backup has.
    fn home() -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        let at = |path: &str| home.path().join(path);
        let forge = "forge/app/repository.git/objects/aa";
        for path in ["artifacts/ses_1", forge, SNAPSHOTS, "layers/one", "image-layers/two"] {
            fs::create_dir_all(at(path)).unwrap();
        }
        for path in [
            ABOUT,
            SETTINGS,
            "harvest.db",
            "vault.key",
            "token",
            "sessions-of.json",
            "artifacts/ses_1/report",
            "forge/app/repository.git/objects/aa/1",
            "snapshots/1.json",
            "layers/one/file",
        ] {
            fs::write(at(path), "").unwrap();
        }
        // A layer may have anything.
        symlink("/etc", at("layers/one/etc")).unwrap();
        fs::hard_link(at("layers/one/file"), at("image-layers/two/file")).unwrap();
        home
    }

    #[test]
    fn home_with_everything_of_a_backup_is_accepted() {
        assert_eq!(find_foreign(home().path()).unwrap(), None);
    }

    #[test]
    fn anything_else_is_found() {
        type Damage = fn(&Path) -> io::Result<()>;
        let changes: &[(&str, Damage)] = &[
            ("store.json", |path| fs::write(path, "")),
            ("store.btrfs", |path| fs::write(path, "")),
            ("supervisor", |path| fs::create_dir(path)),
            ("sandboxes", |path| symlink("/etc", path)),
            ("trash", |path| symlink("/etc", path)),
            ("harvest.db-wal", |path| fs::write(path, "")),
            ("harvest.db", |path| {
                fs::remove_file(path).and_then(|()| symlink("/etc/passwd", path))
            }),
            ("token", |path| fs::remove_file(path).and_then(|()| fs::create_dir(path))),
            ("vault.key", |path| fs::hard_link(path, path.with_file_name("layers/one/key"))),
            ("image-layers", |path| fs::remove_dir_all(path).and_then(|()| symlink("/etc", path))),
            ("layers", |path| fs::remove_dir_all(path).and_then(|()| fs::write(path, ""))),
            ("layers/evil", |path| symlink("/", path)),
            ("layers/evil", |path| fs::write(path, "")),
            ("layers/e.vil", |path| fs::create_dir(path)),
            ("image-layers/evil", |path| symlink("/", path)),
            ("snapshots/2.json", |path| symlink("/etc/passwd", path)),
            ("artifacts/ses_1/link", |path| symlink("/etc/passwd", path)),
            ("forge/app", |path| fs::remove_dir_all(path).and_then(|()| symlink("/etc", path))),
            ("forge", |path| fs::remove_dir_all(path).and_then(|()| symlink("/etc", path))),
        ];
        for (path, change) in changes {
            let home = home();
            let changed = home.path().join(path);
            change(&changed).unwrap();
            assert_eq!(find_foreign(home.path()).unwrap(), Some(changed), "{path}");
        }
    }
}
