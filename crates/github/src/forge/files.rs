//! The forge's files: written whole or not at all, and what a killed process left of them removed.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use harvest_proto::{Secret, SessionId};
use ring::digest::{SHA256, digest};

use super::{ForgeError, LEFT_OVER};

// Removes what a process that was killed left half done: drafts of ours, and git's half-received packs. Young ones may
// belong to somebody who is still at work.
pub(super) fn sweep(root: &Path) {
    let mut folders = vec![root.to_owned()];
    for place in entries(root) {
        folders.extend([
            place.join("pulls"),
            place.join("repository.git/objects"),
            place.join("repository.git/objects/pack"),
        ]);
        folders.push(place);
    }
    let left_over = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ours = name.starts_with(".new-")
            || name.starts_with("tmp_objdir-")
            || name.starts_with("tmp_pack_");
        let age = fs::symlink_metadata(path)
            .and_then(|data| data.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        ours && age.is_some_and(|age| age > LEFT_OVER)
    };
    for path in folders.iter().flat_map(|folder| entries(folder)).filter(left_over) {
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        if let Err(error) = removed {
            tracing::warn!(path = %path.display(), %error, "cannot remove a left-over file");
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

pub(super) fn write_token(place: &Path, token: &Secret<String>) -> Result<(), ForgeError> {
    write_whole(&place.join("token"), hash(token.expose()).as_bytes())
}

// Under its name there is the old file or the new one, never half of either.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), ForgeError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let draft = folder.join(format!(".new-{}", SessionId::random().part()));
    let written = fs::File::create_new(&draft).and_then(|mut file| {
        io::Write::write_all(&mut file, bytes)?;
        file.sync_all()?;
        fs::rename(&draft, path)
    });
    if written.is_err() {
        // The disk may be full; the draft is of no use, and the next write makes another.
        let _ = fs::remove_file(&draft);
    }
    written.map_err(file_error("write", path))?;
    sync_folder(folder)
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), ForgeError> {
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("sync", folder))
}

pub(super) fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ForgeError {
    let path = path.display().to_string();
    move |source| ForgeError::File { doing, path, source }
}
