//! Atomic writes of the forge's files, and removal of drafts that killed processes left.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use harvest_proto::{Secret, SessionId};
use ring::digest::{SHA256, digest};
use serde::{Serialize, de::DeserializeOwned};

use super::{ABANDONED_AFTER, ForgeError};

/// Removes drafts and partially received packs of killed processes. Recent ones may belong to a
/// process that is still running.
pub(super) fn remove_abandoned_drafts(root: &Path) {
    let mut folders = vec![root.to_owned()];
    for folder in entries(root) {
        folders.extend([
            folder.join("pr"),
            folder.join("comments"),
            folder.join("statuses"),
            folder.join("repository.git/objects"),
            folder.join("repository.git/objects/pack"),
        ]);
        folders.push(folder);
    }
    let abandoned = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let draft = name.starts_with(".new-")
            || name.starts_with("tmp_objdir-")
            || name.starts_with("tmp_pack_");
        let age = fs::symlink_metadata(path)
            .and_then(|data| data.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        draft && age.is_some_and(|age| age > ABANDONED_AFTER)
    };
    for path in folders.iter().flat_map(|folder| entries(folder)).filter(abandoned) {
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        if let Err(error) = removed {
            tracing::warn!(path = %path.display(), %error, "cannot remove an abandoned draft");
        }
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(Result::ok).map(|entry| entry.path()).collect()
}

pub(super) fn hash(token: &str) -> String {
    digest(&SHA256, token.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn write_token(folder: &Path, token: &Secret<String>) -> Result<(), ForgeError> {
    write_atomically(&folder.join("token"), hash(token.expose()).as_bytes())
}

/// Replaces a file durably: readers see either the old or the new content.
pub(super) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ForgeError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let draft = folder.join(format!(".new-{}", SessionId::random().part()));
    let written = fs::File::create_new(&draft).and_then(|mut file| {
        io::Write::write_all(&mut file, bytes)?;
        file.sync_all()?;
        fs::rename(&draft, path)
    });
    if written.is_err() {
        // The disk may be full: free what the draft takes.
        let _ = fs::remove_file(&draft);
    }
    written.map_err(file_error("write", path))?;
    sync_folder(folder)
}

/// Reads a record; `None` when there is no such file.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ForgeError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| file_error("read", path)(error.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("read", path)(error)),
    }
}

/// Writes a record durably; creates its folder if needed.
pub(super) fn write_json(path: &Path, record: &impl Serialize) -> Result<(), ForgeError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if !folder.is_dir() {
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        created.map_err(file_error("create", folder))?;
    }
    let bytes = serde_json::to_vec_pretty(record)
        .map_err(|error| file_error("write", path)(error.into()))?;
    write_atomically(path, &bytes)
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), ForgeError> {
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("sync", folder))
}

pub(super) fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ForgeError {
    let path = path.display().to_string();
    move |source| ForgeError::File { doing, path, source }
}
