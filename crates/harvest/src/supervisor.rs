//! Writes the embedded supervisor to a file, so that the engine can execute it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{atomic_write, config::process_env, printer::Advice};

/// The supervisor binary, if it existed at build time.
const BYTES: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/supervisor.rs"));

/// The supervisor's file on this host. Its folder is named after its hash, so that running
/// sandboxes keep the version they were started with.
pub(crate) fn install(home: &Path) -> Result<PathBuf> {
    if let Some(path) = override_path() {
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

/// `HARVEST_SUPERVISOR`, if it names a file.
fn override_path() -> Option<PathBuf> {
    process_env("HARVEST_SUPERVISOR").map(PathBuf::from).filter(|path| path.is_file())
}

/// Writes the file atomically and durably.
fn write(folder: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    atomic_write::write(path, bytes, 0o755)?;
    fs::File::open(folder)?.sync_all()
}
