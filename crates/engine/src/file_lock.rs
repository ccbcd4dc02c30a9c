//! Locks on files and folders, held against other processes.

use std::{fs::File, os::unix::fs::OpenOptionsExt, path::Path};

use rustix::fs::FlockOperation;

use crate::error::{AtPath, EngineError};

/// Opens a lock file and locks it. Dropping the file, or the end of the process, unlocks it.
pub(crate) fn lock(path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .at("open the lock", path)?;
    flock(file, path, operation)
}

/// Locks a folder itself, which works on a full disk.
pub(crate) fn lock_folder(path: &Path) -> Result<File, EngineError> {
    let folder = File::open(path).at("open", path)?;
    flock(folder, path, FlockOperation::LockExclusive)
}

/// [`lock_folder`] without waiting; `None` when the folder is locked.
pub(crate) fn try_lock_folder(path: &Path) -> Result<Option<File>, EngineError> {
    let folder = File::open(path).at("open", path)?;
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(EngineError::file("lock", path, error)),
    }
}

fn flock(file: File, path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    loop {
        match rustix::fs::flock(&file, operation) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(EngineError::file("lock", path, error)),
        }
    }
}
