//! Where an installation keeps its things, and how small files are put there so that a crash at any
//! moment leaves the old one or the new one.

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
    error::{AtPath, EngineError},
    room::Thresholds,
    store::{self, Driver, StoreKind},
    writable,
};

/// Where the engine lives and what it needs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The state of this installation; mode 0700.
    pub home: PathBuf,
    /// Layers of recipes and records of images, shared by all homes; mode 0700.
    pub cache: PathBuf,
    /// The static supervisor's file on the host.
    pub supervisor: PathBuf,
    /// The command that runs [`crate::zygote::main`]; the home is appended as its last argument,
    /// with `--probe` before it for [`crate::probe::main`].
    pub zygote: Vec<OsString>,
    /// How the home keeps disks if it is new.
    pub driver: Driver,
    /// When there is too little room on a disk.
    pub thresholds: Thresholds,
}

/// The folders of a home.
#[derive(Debug, Clone)]
pub(crate) struct Home {
    path: PathBuf,
    store: StoreKind,
}

impl Home {
    /// A home that keeps disks like this.
    pub(crate) fn new(path: PathBuf, store: StoreKind) -> Self {
        Self { path, store }
    }

    /// A home as its record describes it.
    pub(crate) fn find(path: PathBuf) -> Result<Self, EngineError> {
        let store = store::kind_of(&path)?.unwrap_or(StoreKind::Dir);
        Ok(Self::new(path, store))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where disks and their records are.
    pub(crate) fn root(&self) -> PathBuf {
        store::root(&self.path, self.store)
    }

    /// Sockets; nobody but root may look inside.
    pub(crate) fn run(&self) -> PathBuf {
        self.path.join("run")
    }

    pub(crate) fn run_of(&self, id: &SandboxId) -> PathBuf {
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

    /// Volumes are files on the host's own disk, whatever the store is.
    pub(crate) fn volumes(&self) -> PathBuf {
        self.path.join("volumes")
    }

    pub(crate) fn trash(&self) -> PathBuf {
        self.root().join("trash")
    }

    pub(crate) fn zygote_socket(&self) -> PathBuf {
        self.run().join("zygote.sock")
    }

    /// The cgroup of this home: the same for the same path, different for others.
    pub(crate) fn group(&self) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, self.path.as_os_str().as_bytes());
        let hex: String = digest.as_ref()[..6].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("harvest-{hex}")
    }

    /// Makes the folders that are missing.
    pub(crate) fn make(&self) -> Result<(), EngineError> {
        for folder in
            [self.run(), self.volumes(), self.sandboxes(), self.trash(), self.host_trash()]
        {
            make_private(&folder)?;
        }
        Ok(())
    }

    /// Trash on the host's own disk; the same where that is where disks are.
    pub(crate) fn host_trash(&self) -> PathBuf {
        self.path.join("trash")
    }

    /// Whether the store itself holds a sandbox to what it may write.
    pub(crate) fn has_quotas(&self) -> bool {
        self.store == StoreKind::BtrfsFile
    }

    /// Gets rid of a folder of the home at once: its name is free when this returns. Answers what it is
    /// called in the trash, if there was one.
    pub(crate) fn discard(&self, path: &Path) -> Result<Option<String>, EngineError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let thrown = format!("{name}-{}", SandboxId::random().part());
        let trash = if path.starts_with(self.root()) { self.trash() } else { self.host_trash() };
        match fs::rename(path, trash.join(&thrown)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            result => result.at("throw away", path).map(|()| Some(thrown)),
        }
    }
}

/// Makes a folder only root can enter, with its parents.
pub(crate) fn make_private(path: &Path) -> Result<(), EngineError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).at("make the folder", path)
}

/// How the name of a record ends that is being written.
pub(crate) const UNFINISHED: &str = ".new";

/// How much a written record must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Survives {
    /// A crash of ours.
    Crash,
    /// Also a power cut.
    PowerCut,
}

/// Writes a record as a whole: a reader sees the old one or the new one.
pub(crate) fn write_record<T: Serialize>(
    path: &Path,
    record: &T,
    survives: Survives,
) -> Result<(), EngineError> {
    let bytes = serde_json::to_vec(record)
        .map_err(|source| EngineError::Record { path: path.to_owned(), source })?;
    let new = path.with_extension(format!("{}{UNFINISHED}", SandboxId::random().part()));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(&bytes)?;
        if survives == Survives::PowerCut {
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
        Some(folder) if survives == Survives::PowerCut => sync(folder),
        _ => Ok(()),
    }
}

/// Brings a file's content or a folder's names to the disk.
pub(crate) fn sync(path: &Path) -> Result<(), EngineError> {
    File::open(path).and_then(|file| file.sync_all()).at("sync", path)
}

/// A record, unless there is none.
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EngineError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result.at("read", path)?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| EngineError::Record { path: path.to_owned(), source })
}

/// Names this boot of the host: what was written during another one tells of no living process.
pub(crate) fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    })
}

/// When a process was started, in ticks since boot: with its pid, a name no other process ever has.
/// `None` when there is no such process or it is a zombie.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name is in parentheses and may hold anything; what follows the last one is ours.
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
    fn a_process_is_told_from_a_later_one_with_its_pid() {
        let own = start_ticks(std::process::id()).unwrap();
        assert!(own > 0);
        assert_eq!(start_ticks(u32::MAX), None);
    }

    #[test]
    fn a_record_survives_writing_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        for value in [1u32, 2] {
            write_record(&path, &value, Survives::PowerCut).unwrap();
            assert_eq!(read_record::<u32>(&path).unwrap(), Some(value));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(read_record::<u32>(&folder.path().join("other.json")).unwrap(), None);
    }

    #[test]
    fn two_homes_have_two_cgroups() {
        assert_ne!(
            Home::new("/a".into(), StoreKind::Dir).group(),
            Home::new("/b".into(), StoreKind::Dir).group()
        );
    }
}
