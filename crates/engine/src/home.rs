//! The folders of a home, and reading and writing records so that a crash leaves the old or the new
//! one.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::OnceLock,
};

use harvest_proto::SandboxId;
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    disk::hex,
    disk_thresholds::Thresholds,
    error::{AtPath, EngineError},
    store::{self, Driver, StoreKind},
    writable,
};

/// The engine's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The folder with the state of this installation; mode 0700.
    pub home: PathBuf,
    /// The folder with images and their layers, shared by all homes; mode 0700.
    pub cache: PathBuf,
    /// The static supervisor's file on the host.
    pub supervisor: PathBuf,
    /// The command that runs [`crate::zygote::main`]; the home is appended as its last argument,
    /// with `--probe` before it for [`crate::probe::main`].
    pub zygote: Vec<OsString>,
    /// How to store disks in a new home; no effect on an existing one.
    pub driver: Driver,
    /// The free space below which operations are refused.
    pub thresholds: Thresholds,
}

/// The folders of a home.
#[derive(Debug, Clone)]
pub(crate) struct Home {
    path: PathBuf,
    store: StoreKind,
}

impl Home {
    /// A home whose kind of store is known.
    pub(crate) fn new(path: PathBuf, store: StoreKind) -> Self {
        Self { path, store }
    }

    /// A home with the kind of store from its record.
    pub(crate) fn find(path: PathBuf) -> Result<Self, EngineError> {
        let store = store::read_kind(&path)?.unwrap_or(StoreKind::Dir);
        Ok(Self::new(path, store))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// How this home stores disks.
    pub(crate) fn store(&self) -> StoreKind {
        self.store
    }

    /// The folder of disks and their records.
    pub(crate) fn root(&self) -> PathBuf {
        store::root(&self.path, self.store)
    }

    /// The folder of sockets; accessible to root only.
    pub(crate) fn run(&self) -> PathBuf {
        self.path.join("run")
    }

    pub(crate) fn sandbox_run(&self, id: &SandboxId) -> PathBuf {
        self.run().join(id.part())
    }

    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.root().join("sandboxes")
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.part())
    }

    /// The folder with a sandbox's `upper` and `work`.
    pub(crate) fn writable(&self, id: &SandboxId) -> PathBuf {
        writable::folder(&self.sandbox(id), self.store)
    }

    /// Volumes; always on the home's own file system, also with a store in a file.
    pub(crate) fn volumes(&self) -> PathBuf {
        self.path.join("volumes")
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.root().join("layers")
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root().join("snapshots")
    }

    /// Layers being written. Outside of a capture, an entry is left from a crash.
    pub(crate) fn partial(&self) -> PathBuf {
        self.root().join("partial")
    }

    pub(crate) fn trash(&self) -> PathBuf {
        self.root().join("trash")
    }

    pub(crate) fn zygote_socket(&self) -> PathBuf {
        self.run().join("zygote.sock")
    }

    /// The name of this home's cgroup, derived from its path.
    pub(crate) fn cgroup_name(&self) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, self.path.as_os_str().as_bytes());
        format!("harvest-{}", hex(&digest.as_ref()[..6]))
    }

    /// Creates missing folders.
    pub(crate) fn create_folders(&self) -> Result<(), EngineError> {
        for folder in [
            self.run(),
            self.volumes(),
            self.sandboxes(),
            self.layers(),
            self.snapshots(),
            self.partial(),
            self.trash(),
            self.host_trash(),
        ] {
            create_private_dir(&folder)?;
        }
        Ok(())
    }

    /// The trash on the home's own file system; differs from [`Home::trash`] for a store in a file.
    pub(crate) fn host_trash(&self) -> PathBuf {
        self.path.join("trash")
    }

    /// Whether the store enforces the size limits of writable layers.
    pub(crate) fn has_quotas(&self) -> bool {
        self.store == StoreKind::BtrfsFile
    }

    /// Moves a folder of the home to the trash, so that its name is free at once. Returns its name
    /// in the trash, if the folder existed.
    pub(crate) fn discard(&self, path: &Path) -> Result<Option<String>, EngineError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let trash_name = format!("{name}-{}", SandboxId::random().part());
        let trash = if path.starts_with(self.root()) { self.trash() } else { self.host_trash() };
        match fs::rename(path, trash.join(&trash_name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            result => result.at("remove", path).map(|()| Some(trash_name)),
        }
    }
}

/// Creates a folder and its parents with mode 0700.
pub(crate) fn create_private_dir(path: &Path) -> Result<(), EngineError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).at("create the folder", path)
}

/// The file name suffix of a record that is being written.
pub(crate) const UNFINISHED_SUFFIX: &str = ".new";

/// What a written record must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// A crash of the process.
    Crash,
    /// A power cut, which costs an fsync.
    PowerCut,
}

/// Writes a record atomically: a reader sees the old or the new one.
pub(crate) fn write_record<T: Serialize>(
    path: &Path,
    record: &T,
    durability: Durability,
) -> Result<(), EngineError> {
    let bytes = serde_json::to_vec(record)
        .map_err(|source| EngineError::Record { path: path.to_owned(), source })?;
    let new = path.with_extension(format!("{}{UNFINISHED_SUFFIX}", SandboxId::random().part()));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(&bytes)?;
        if durability == Durability::PowerCut {
            file.sync_all()?;
        }
        fs::rename(&new, path)
    };
    let result = write();
    if result.is_err() {
        let _ = fs::remove_file(&new);
    }
    result.at("write", path)?;
    match path.parent() {
        Some(folder) if durability == Durability::PowerCut => sync(folder),
        _ => Ok(()),
    }
}

/// Syncs a file's content, or a folder's entries, to the disk.
pub(crate) fn sync(path: &Path) -> Result<(), EngineError> {
    File::open(path).and_then(|file| file.sync_all()).at("sync", path)
}

/// Reads a record; `None` when the file does not exist.
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EngineError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result.at("read", path)?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| EngineError::Record { path: path.to_owned(), source })
}

/// The id of the current boot. Processes recorded during another boot no longer exist.
pub(crate) fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    })
}

/// The start time of a process in ticks since boot; together with the pid it identifies the
/// process. `None` when the process does not exist or is a zombie.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may contain any text; the fields follow the last `)`.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_ticks_exist_only_for_live_processes() {
        let own = start_ticks(std::process::id()).unwrap();
        assert!(own > 0);
        assert_eq!(start_ticks(u32::MAX), None);
    }

    #[test]
    fn writing_a_record_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        for value in [1u32, 2] {
            write_record(&path, &value, Durability::PowerCut).unwrap();
            assert_eq!(read_record::<u32>(&path).unwrap(), Some(value));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(read_record::<u32>(&folder.path().join("other.json")).unwrap(), None);
    }

    #[test]
    fn each_home_has_its_own_cgroup() {
        assert_ne!(
            Home::new("/a".into(), StoreKind::Dir).cgroup_name(),
            Home::new("/b".into(), StoreKind::Dir).cgroup_name()
        );
    }
}
