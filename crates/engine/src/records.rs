//! Records: small JSON files, written so that a crash leaves the old or the new one. Does not know
//! what they mean.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, ErrorKind, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use ring::rand::{SecureRandom, SystemRandom};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{AtPath, EngineError};

/// The file name suffix of a record that is being written.
pub(crate) const UNFINISHED_SUFFIX: &str = ".new";

/// Writes a record atomically: after a crash or power cut, the old or the new one exists.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> Result<(), EngineError> {
    write_atomically(path, record, File::sync_all)?;
    path.parent().map_or(Ok(()), sync)
}

/// [`write_record`] without an fsync: the record survives a crash of the process, not a power cut.
pub(crate) fn write_record_unsynced(
    path: &Path,
    record: &impl Serialize,
) -> Result<(), EngineError> {
    write_atomically(path, record, |_| Ok(()))
}

fn write_atomically(
    path: &Path,
    record: &impl Serialize,
    flush: impl Fn(&File) -> io::Result<()>,
) -> Result<(), EngineError> {
    let bytes = serde_json::to_vec(record)
        .map_err(|source| EngineError::Record { path: path.to_owned(), source })?;
    let new = path.with_extension(format!("{}{UNFINISHED_SUFFIX}", random_name()));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(&bytes)?;
        flush(&file)?;
        fs::rename(&new, path)
    };
    let result = write();
    if result.is_err() {
        let _ = fs::remove_file(&new);
    }
    result.at("write", path)
}

/// Syncs a file's content, or a folder's entries, to the disk.
pub(crate) fn sync(path: &Path) -> Result<(), EngineError> {
    File::open(path).and_then(|file| file.sync_all()).at("sync", path)
}

/// Reads a record; `None` when the file does not exist.
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EngineError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        result => result.at("read", path)?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| EngineError::Record { path: path.to_owned(), source })
}

/// Creates a folder and its parents with mode 0700.
pub(crate) fn create_private_dir(path: &Path) -> Result<(), EngineError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).at("create the folder", path)
}

/// All records of a folder with their paths. A record may be removed between listing and reading.
pub(crate) fn read_records<T: DeserializeOwned>(
    folder: &Path,
) -> Result<Vec<(PathBuf, T)>, EngineError> {
    let mut records = Vec::new();
    for name in names_in(folder)?.iter().filter(|name| name.ends_with(".json")) {
        let path = folder.join(name);
        records.extend(read_record(&path)?.map(|record| (path, record)));
    }
    Ok(records)
}

/// The names in a folder, sorted; empty when the folder does not exist.
pub(crate) fn names_in(folder: &Path) -> Result<Vec<String>, EngineError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        result => result.at("list", folder)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // The engine only creates UTF-8 names; others are not its own.
        names.extend(entry.at("list", folder)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Removes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<(), EngineError> {
    unless_missing(fs::remove_file(path)).at("remove", path)
}

/// Treats a missing file as success.
pub(crate) fn unless_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// A random, unused file name.
pub fn random_name() -> String {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes).expect("getrandom exists on every supported kernel");
    hex(&bytes)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_a_record_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        for value in [1u32, 2] {
            write_record(&path, &value).unwrap();
            assert_eq!(read_record::<u32>(&path).unwrap(), Some(value));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(read_record::<u32>(&folder.path().join("other.json")).unwrap(), None);
    }
}
