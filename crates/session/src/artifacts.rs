//! The contents of artifacts: files of this server's home, each named by the hash of its content.
//! A file is complete and on disk before its row exists, and removed after its last row.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use harvest_proto::{PromptId, api::MAX_ARTIFACT_BYTES};
use harvest_store::{Store, StoreError};
use ring::digest;
use rustix::fs::statvfs;
use tokio::sync::{Mutex, MutexGuard};

use crate::{bridge::FileReader, error_chain::error_chain, hex::hex};

// What has to stay free on the disk, for the database and the snapshots.
const FREE_BYTES: u64 = 1 << 30;

const PARTIAL: &str = "partial-";

pub(crate) struct ArtifactFiles {
    /// None on a server without a home, as in tests.
    folder: Option<PathBuf>,
    /// Held from the check that a content is in use, or not, until that is acted on.
    lock: Mutex<()>,
}

/// A complete file that has no name yet. Dropping this removes it.
pub(crate) struct ReceivedFile {
    path: PathBuf,
    pub(crate) sha256: String,
    pub(crate) bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("this server keeps no artifacts")]
    NoFolder,
    #[error("the file has more than {MAX_ARTIFACT_BYTES} bytes")]
    TooLong,
    #[error("the server's disk is almost full")]
    NoSpace,
    #[error("cannot read the file")]
    Read(#[source] crate::bridge::BridgeError),
    #[error("cannot store the file")]
    Write(#[from] io::Error),
}

impl ArtifactFiles {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, lock: Mutex::default() }
    }

    fn folder(&self) -> Result<&Path, ReceiveError> {
        self.folder.as_deref().ok_or(ReceiveError::NoFolder)
    }

    /// Where the content of an artifact is.
    pub(crate) fn path(&self, sha256: &str) -> Option<PathBuf> {
        let plain = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
        Some(self.folder.as_ref().filter(|_| plain)?.join(sha256))
    }

    /// Copies a file of a sandbox to this server's disk.
    pub(crate) async fn receive(
        &self,
        mut reader: FileReader,
    ) -> Result<ReceivedFile, ReceiveError> {
        let folder = self.folder()?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let path = folder.join(format!("{PARTIAL}{}", PromptId::random().part()));
        let mut file = File::options().write(true).create_new(true).open(&path)?;
        let mut received = ReceivedFile { path, sha256: String::new(), bytes: 0 };
        let mut hash = digest::Context::new(&digest::SHA256);
        while let Some(chunk) = reader.next().await.map_err(ReceiveError::Read)? {
            received.bytes += chunk.len() as u64;
            if received.bytes > MAX_ARTIFACT_BYTES {
                return Err(ReceiveError::TooLong);
            }
            if !has_space(folder)? {
                return Err(ReceiveError::NoSpace);
            }
            hash.update(&chunk);
            file.write_all(&chunk)?;
        }
        let synced = tokio::task::spawn_blocking(move || file.sync_all()).await;
        synced.map_err(io::Error::other)??;
        received.sha256 = hex(hash.finish().as_ref());
        Ok(received)
    }

    /// From now on no content is removed until the guard is dropped.
    pub(crate) async fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().await
    }

    /// Gives a received file its name. Its row is written while the lock is still held.
    pub(crate) fn keep(
        &self,
        _lock: &MutexGuard<'_, ()>,
        file: &ReceivedFile,
    ) -> Result<(), ReceiveError> {
        let folder = self.folder()?;
        fs::rename(&file.path, folder.join(&file.sha256))?;
        File::open(folder)?.sync_all()?;
        Ok(())
    }

    /// Removes a content unless a session has it again.
    pub(crate) async fn remove(&self, store: &Store, sha256: &str) -> io::Result<()> {
        let lock = self.lock().await;
        self.remove_locked(&lock, store, sha256).await
    }

    /// As [`ArtifactFiles::remove`], while the lock is held.
    pub(crate) async fn remove_locked(
        &self,
        _lock: &MutexGuard<'_, ()>,
        store: &Store,
        sha256: &str,
    ) -> io::Result<()> {
        let Some(path) = self.path(sha256) else { return Ok(()) };
        match store.artifact_exists(sha256).await {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the incomplete files of a killed server, before one can be received.
    pub(crate) fn remove_partial(&self) {
        for (name, path) in self.files().filter(|(name, _)| name.starts_with(PARTIAL)) {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(name, error = error_chain(&error), "cannot remove an artifact");
            }
        }
    }

    /// Removes the complete files without a row that a killed server left. Only if all rows are in
    /// this store.
    pub(crate) async fn remove_orphans(&self, store: &Store) {
        for (name, _) in self.files().filter(|(name, _)| !name.starts_with(PARTIAL)) {
            if let Err(error) = self.remove(store, &name).await {
                tracing::warn!(name, error = error_chain(&error), "cannot remove an artifact");
            }
        }
    }

    fn files(&self) -> impl Iterator<Item = (String, PathBuf)> + use<> {
        let entries = self.folder.as_ref().and_then(|folder| fs::read_dir(folder).ok());
        let named =
            |entry: fs::DirEntry| (entry.file_name().to_string_lossy().into_owned(), entry.path());
        entries.into_iter().flatten().flatten().map(named)
    }
}

impl Drop for ReceivedFile {
    fn drop(&mut self) {
        // It has its name already, unless something failed.
        let _renamed = fs::remove_file(&self.path);
    }
}

fn has_space(folder: &Path) -> io::Result<bool> {
    let disk = statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize) > FREE_BYTES)
}

impl From<ReceiveError> for crate::error::SessionError {
    fn from(error: ReceiveError) -> Self {
        Self::invalid("artifact_refused", error_chain(&error))
    }
}

/// The error of a store in words for the agent.
pub(crate) fn is_taken(error: &StoreError) -> bool {
    matches!(error, StoreError::Exists { .. })
}
