//! The supervisor that comes with this binary, written out once so that the engine can exec it.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{config::process_env, printer::Advice};

/// The program itself, when it was there at build time.
const BYTES: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/supervisor.rs"));

/// The supervisor's file on this host. Its folder has the hash of its bytes, so that a sandbox of an
/// older version keeps the one it was started with.
pub(crate) fn place(home: &Path) -> Result<PathBuf> {
    if let Some(path) = named() {
        return Ok(path);
    }
    let Some(bytes) = BYTES else {
        return Err(Advice::new("built without a supervisor", "build with `make build`").into());
    };
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    let name: String = hash.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let folder = home.join("supervisor").join(name);
    let path = folder.join("harvest-supervisor");
    if fs::metadata(&path).is_ok_and(|file| file.len() == bytes.len() as u64) {
        return Ok(path);
    }
    write(&folder, &path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// `HARVEST_SUPERVISOR`, when it names a file.
fn named() -> Option<PathBuf> {
    process_env("HARVEST_SUPERVISOR").map(PathBuf::from).filter(|path| path.is_file())
}

/// Under its name only once it is whole and on disk.
fn write(folder: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let half = folder.join(format!(".harvest-supervisor.{}", std::process::id()));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(&half)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&half, path)?;
    fs::File::open(folder)?.sync_all()
}
