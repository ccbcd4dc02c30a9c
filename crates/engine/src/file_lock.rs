//! Locks on files and folders, held against other processes.

use std::{fs::File, io::ErrorKind, os::unix::fs::OpenOptionsExt, path::Path};

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

/// Locks a file exclusively without waiting; `None` while it is locked.
pub(crate) fn try_lock(path: &Path) -> Result<Option<File>, EngineError> {
    match lock(path, FlockOperation::NonBlockingLockExclusive) {
        Err(EngineError::File { source, .. }) if source.kind() == ErrorKind::WouldBlock => Ok(None),
        result => result.map(Some),
    }
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
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        result => result.at("lock", path).map(|()| Some(folder)),
    }
}

fn flock(file: File, path: &Path, operation: FlockOperation) -> Result<File, EngineError> {
    rustix::io::retry_on_intr(|| rustix::fs::flock(&file, operation)).at("lock", path)?;
    Ok(file)
}
