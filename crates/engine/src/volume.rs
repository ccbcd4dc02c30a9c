//! Volumes: named file systems that outlive sandboxes and are not part of snapshots. This file has
//! their records and operations; `image` creates and mounts the file system.
//!
//! A volume is a folder `volumes/NAME` with a record, created under a temporary name and renamed
//! when complete. A lock file beside it is held while the volume is created, mounted or removed,
//! but not while a sandbox uses it: the kernel knows all mounts, also after a crash.

mod image;
pub(crate) mod state;

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Component, Path, PathBuf},
};

use harvest_proto::Timestamp;
use rustix::fs::{AtFlags, CWD, FlockOperation, Gid, Mode, Uid};
use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError,
    disk_thresholds::free_and_total_bytes,
    disk_usage::tree_bytes,
    error::AtPath,
    file_lock, records,
    records::{read_record, sync, write_record},
    rootless,
    sandbox_record::{Record, SandboxState},
    spec::{VolumeMount, VolumeName},
    syscall,
    zygote::{client, protocol::Request},
};

/// The owner of a volume and its folders inside: the user that agents and commands run as.
const OWNER: u32 = 10_001;

// Free space that stays for the host after creating a volume.
const MARGIN_BYTES: u64 = 1 << 30;
const MIN_BYTES: u64 = 4 << 20;
const MAX_BYTES: u64 = 1 << 44;

/// The size of a volume unless another one is chosen.
pub const DEFAULT_BYTES: u64 = 2 << 30;
const MAX_FILES: u64 = 500_000;

/// A volume to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSpec {
    /// The volume's name.
    pub name: VolumeName,
    /// The maximum size; slightly less is usable.
    pub size_bytes: u64,
    /// The minimum number of files, folders and links the volume can hold.
    pub files: u64,
    /// Folders to create in the volume whenever a sandbox mounts it.
    pub folders: Vec<String>,
    /// Take space on the host's disk only as it is used, instead of all of it at once.
    pub sparse: bool,
    /// The repository that the volume belongs to.
    pub owner: Option<String>,
}

impl VolumeSpec {
    /// 2 GiB for 500,000 files.
    #[must_use]
    pub const fn new(name: VolumeName) -> Self {
        let (size_bytes, files) = (DEFAULT_BYTES, MAX_FILES);
        Self { name, size_bytes, files, folders: Vec::new(), sparse: false, owner: None }
    }
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// The volume's name.
    pub name: VolumeName,
    /// How the volume is stored.
    pub backing: Backing,
    /// The maximum size.
    pub size_bytes: u64,
    /// The minimum number of files the volume can hold.
    pub files: u64,
    /// Folders to create in the volume whenever a sandbox mounts it.
    pub folders: Vec<String>,
    /// The volume takes space on the host's disk only as it is used.
    pub sparse: bool,
    /// The repository that the volume belongs to.
    pub owner: Option<String>,
    /// When the volume was created.
    pub created_at: Timestamp,
}

/// How a volume is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// A file system in a file; the kernel enforces its limits.
    Image,
    /// A plain folder, without root, which cannot mount file systems. Its limits are not enforced.
    Folder,
}

impl Engine {
    /// Creates a volume and, unless it is sparse, reserves all of its space on the host's disk.
    ///
    /// # Errors
    /// When the name is in use, the sizes are invalid or the host has too little free space.
    pub fn volume_create(&self, spec: &VolumeSpec) -> Result<Volume, EngineError> {
        check_spec(spec)?;
        let _lock = self.volume_lock(&spec.name)?;
        if self.volume(&spec.name)?.is_some() {
            return Err(EngineError::VolumeExists(spec.name.clone()));
        }
        self.volume_create_atomically(spec)
    }

    /// Every volume, by name.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn volumes(&self) -> Result<Vec<Volume>, EngineError> {
        let mut volumes = Vec::new();
        for name in records::names_in(&self.disk.home.volumes())? {
            if let Ok(name) = name.parse() {
                volumes.extend(self.volume(&name)?);
            }
        }
        volumes.sort_by(|one: &Volume, other| one.name.cmp(&other.name));
        Ok(volumes)
    }

    /// The volume with this name, if it exists.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn volume(&self, name: &VolumeName) -> Result<Option<Volume>, EngineError> {
        read_record(&self.volume_folder(name).join("record.json"))
    }

    /// The bytes a volume takes on the host's disk; 0 when it cannot be measured.
    #[must_use]
    pub fn volume_bytes(&self, volume: &Volume) -> u64 {
        let folder = self.volume_folder(&volume.name);
        match volume.backing {
            Backing::Image => image::allocated_bytes(&folder).unwrap_or(0),
            Backing::Folder => tree_bytes(&folder.join(FILES_FOLDER)).unwrap_or(0),
        }
    }

    /// Removes a volume with all of its content. Idempotent.
    ///
    /// # Errors
    /// When a sandbox uses the volume.
    pub fn volume_remove(&self, name: &VolumeName) -> Result<(), EngineError> {
        let lock = self.volume_lock(name)?;
        let folder = self.volume_folder(name);
        if let Some(volume) = self.volume(name)? {
            let in_use = match volume.backing {
                Backing::Image => {
                    // The zygote may hold the volume for the next sandbox.
                    let release = Request::Release { volume: name.clone() };
                    client::ask_if_running(&self.disk.home, &release)?;
                    image::is_in_use(&folder)?
                }
                Backing::Folder => self.is_mounted_by_record(name)?,
            };
            if in_use {
                return Err(EngineError::VolumeInUse(name.clone()));
            }
        }
        // Renamed first: if interrupted, garbage collection removes the rest as an unfinished
        // volume.
        let old = self.disk.home.volumes().join(format!("{UNFINISHED_PREFIX}{name}"));
        self.disk.home.discard(&old)?;
        match fs::rename(&folder, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => {
                result.at("remove", &folder)?;
                fs::remove_dir_all(&old).at("remove", &old)?;
            }
        }
        // Removed while locked: a waiter checks afterwards whether the lock file still exists.
        fs::remove_file(&lock.path).at("remove", &lock.path)
    }

    /// The volumes of a spec. Fails when one is missing or a mount point is invalid or used twice.
    pub(crate) fn volumes_of(&self, mounts: &[VolumeMount]) -> Result<Vec<Volume>, EngineError> {
        let mut mount_points = BTreeSet::new();
        mounts
            .iter()
            .map(|mount| {
                check_mount_point(&mount.inside)?;
                if !mount_points.insert(&mount.inside) {
                    let reason =
                        format!("two volumes have the mount point `{}`", mount.inside.display());
                    return Err(EngineError::Invalid(reason));
                }
                self.volume(&mount.name)?
                    .ok_or_else(|| EngineError::VolumeMissing { volume: mount.name.clone() })
            })
            .collect()
    }

    /// Mounts the volume detached, without a mount point: the kernel unmounts it with its last
    /// user.
    pub(crate) fn volume_attach(&self, name: &VolumeName) -> Result<OwnedFd, EngineError> {
        let _lock = self.volume_lock(name)?;
        let missing = || EngineError::VolumeMissing { volume: name.clone() };
        let volume = self.volume(name)?.ok_or_else(missing)?;
        let folder = self.volume_folder(name);
        let root = match volume.backing {
            Backing::Image => image::mount(&volume, &folder)?,
            Backing::Folder => {
                let files = folder.join(FILES_FOLDER);
                syscall::clone_mount(CWD, &files, false).at("open", files)?
            }
        };
        create_folders(&root, &volume.folders).at("create the folders of", folder)?;
        Ok(root)
    }

    /// Removes volumes whose creation was interrupted by a crash.
    pub(crate) fn remove_unfinished_volumes(&self) -> Result<(), EngineError> {
        for entry in records::names_in(&self.disk.home.volumes())? {
            let name = entry.strip_prefix(UNFINISHED_PREFIX).map(str::parse::<VolumeName>);
            let Some(Ok(name)) = name else { continue };
            let _lock = self.volume_lock(&name)?;
            self.disk.home.discard(&self.disk.home.volumes().join(entry))?;
        }
        Ok(())
    }

    fn volume_folder(&self, name: &VolumeName) -> PathBuf {
        self.disk.home.volumes().join(name.as_str())
    }

    /// Creates the volume under a temporary name, so that one with its final name is complete.
    fn volume_create_atomically(&self, spec: &VolumeSpec) -> Result<Volume, EngineError> {
        let new = self.disk.home.volumes().join(format!("{UNFINISHED_PREFIX}{}", spec.name));
        // The lock is held, so a leftover is from a process that died.
        self.disk.home.discard(&new)?;
        fs::DirBuilder::new().mode(0o700).create(&new).at("create", &new)?;
        let made = self.volume_fill(spec, &new).and_then(|volume| {
            let folder = self.volume_folder(&spec.name);
            fs::rename(&new, &folder).at("create", folder)?;
            sync(&self.disk.home.volumes())?;
            Ok(volume)
        });
        if made.is_err() {
            let _ = fs::remove_dir_all(&new);
        }
        made
    }

    fn volume_fill(&self, spec: &VolumeSpec, folder: &Path) -> Result<Volume, EngineError> {
        let volume = Volume {
            name: spec.name.clone(),
            // Only the host's root may mount a file system image.
            backing: if rootless::is_active() { Backing::Folder } else { Backing::Image },
            size_bytes: spec.size_bytes,
            files: spec.files,
            folders: spec.folders.clone(),
            sparse: spec.sparse,
            owner: spec.owner.clone(),
            created_at: std::time::SystemTime::now().into(),
        };
        match volume.backing {
            Backing::Image => {
                check_free_space(folder, &spec.name, spec.size_bytes)?;
                image::create(&volume, folder)?;
            }
            Backing::Folder => {
                let files = folder.join(FILES_FOLDER);
                fs::create_dir(&files).at("create", &files)?;
                std::os::unix::fs::chown(&files, Some(OWNER), Some(OWNER)).at("create", files)?;
            }
        }
        write_record(&folder.join("record.json"), &volume)?;
        Ok(volume)
    }

    fn is_mounted_by_record(&self, name: &VolumeName) -> Result<bool, EngineError> {
        for id in self.list()? {
            let record = Record::read(&self.disk.home, &id)?;
            if record.is_some_and(|record| record.volumes.iter().any(|mount| mount.name == *name))
                && matches!(self.find(&id)?, SandboxState::Running(_))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn volume_lock(&self, name: &VolumeName) -> Result<VolumeLock, EngineError> {
        let path = self.disk.home.volumes().join(format!(".lock-{name}"));
        loop {
            let file = file_lock::lock(&path, FlockOperation::LockExclusive)?;
            let own = file.metadata().at("access", &path)?;
            // The previous holder may have removed the volume together with its lock file.
            if fs::metadata(&path)
                .is_ok_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino()))
            {
                return Ok(VolumeLock { path, _file: file });
            }
        }
    }
}

/// Held while a volume is created, mounted or removed.
struct VolumeLock {
    path: PathBuf,
    _file: fs::File,
}

/// The prefix of an unfinished volume's folder; invalid in volume names.
const UNFINISHED_PREFIX: &str = ".new-";
/// The folder with the content of a [`Backing::Folder`] volume.
const FILES_FOLDER: &str = "files";

/// The maximum file size: the limit of the writable layer, or the largest volume if that is larger.
pub(crate) fn max_file_bytes(writable_bytes: Option<u64>, volumes: &[Volume]) -> Option<u64> {
    writable_bytes.map(|bytes| volumes.iter().map(|volume| volume.size_bytes).fold(bytes, u64::max))
}

fn check_spec(spec: &VolumeSpec) -> Result<(), EngineError> {
    let reason = if !(MIN_BYTES..=MAX_BYTES).contains(&spec.size_bytes) {
        format!(
            "a volume must have between {MIN_BYTES} and {MAX_BYTES} bytes, not {}",
            spec.size_bytes
        )
    } else if spec.files == 0 || spec.files > spec.size_bytes / 1024 {
        // Each inode takes 256 bytes, used or not.
        format!("a volume of {} bytes cannot hold {} files", spec.size_bytes, spec.files)
    } else if let Some(folder) = spec.folders.iter().find(|folder| !is_one_name(folder)) {
        format!("invalid folder name `{folder}`")
    } else {
        return Ok(());
    };
    Err(EngineError::Invalid(reason))
}

fn is_one_name(text: &str) -> bool {
    let mut parts = Path::new(text).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == text)
}

fn check_mount_point(inside: &Path) -> Result<(), EngineError> {
    let mut parts = inside.components();
    let plain = parts.next() == Some(Component::RootDir)
        && inside.parent().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    let reserved = ["/proc", "/dev", "/sys"].iter().any(|path| inside.starts_with(path));
    if plain && !reserved {
        return Ok(());
    }
    let reason = format!("a volume cannot be mounted at `{}`", inside.display());
    Err(EngineError::Invalid(reason))
}

/// Whether the host's disk has room for `growth_bytes` of a volume, now or, if it is sparse, later.
fn check_free_space(
    folder: &Path,
    name: &VolumeName,
    growth_bytes: u64,
) -> Result<(), EngineError> {
    let (free_bytes, _) = free_and_total_bytes(folder)?;
    let needed_bytes = growth_bytes.saturating_add(MARGIN_BYTES);
    if needed_bytes <= free_bytes {
        return Ok(());
    }
    Err(EngineError::NoRoom { what: format!("volume `{name}`"), needed_bytes, free_bytes })
}

/// Creates missing folders. Anything else with such a name is left as it is.
fn create_folders(root: &OwnedFd, folders: &[String]) -> io::Result<()> {
    for folder in folders {
        match rustix::fs::mkdirat(root, folder, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                let (user, group) = (Some(Uid::from_raw(OWNER)), Some(Gid::from_raw(OWNER)));
                rustix::fs::chownat(root, folder, user, group, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            // A sandbox may have filled the volume or used the name: that must not prevent a start.
            Err(rustix::io::Errno::EXIST | rustix::io::Errno::NOSPC) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_and_relative_mount_points_are_refused() {
        for path in ["/", "", "relative", "/proc", "/dev/shm", "/sys/x", "/a/../proc", "/a/.."] {
            assert!(check_mount_point(Path::new(path)).is_err(), "{path}");
        }
        for path in ["/mnt/state", "/data", "/process"] {
            assert!(check_mount_point(Path::new(path)).is_ok(), "{path}");
        }
    }

    #[test]
    fn invalid_volume_specs_are_refused() {
        let spec = VolumeSpec::new("v".parse().unwrap());
        check_spec(&spec).unwrap();
        for wrong in [
            VolumeSpec { size_bytes: 0, ..spec.clone() },
            VolumeSpec { size_bytes: u64::MAX, ..spec.clone() },
            VolumeSpec { files: 0, ..spec.clone() },
            VolumeSpec { files: u64::MAX, ..spec.clone() },
            VolumeSpec { folders: vec!["../x".into()], ..spec.clone() },
            VolumeSpec { folders: vec!["..".into()], ..spec.clone() },
            VolumeSpec { folders: vec![String::new()], ..spec.clone() },
        ] {
            assert!(check_spec(&wrong).is_err(), "{wrong:?}");
        }
        for name in ["", ".", "a/b", ".new-x", "a b"] {
            assert!(name.parse::<VolumeName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_largest_volume_raises_the_file_size_limit() {
        let volume = Volume {
            name: "v".parse().unwrap(),
            backing: Backing::Image,
            size_bytes: 9,
            files: 1,
            folders: Vec::new(),
            sparse: false,
            owner: None,
            created_at: Timestamp::from_millis(0),
        };
        assert_eq!(max_file_bytes(None, std::slice::from_ref(&volume)), None);
        assert_eq!(max_file_bytes(Some(5), std::slice::from_ref(&volume)), Some(9));
        assert_eq!(max_file_bytes(Some(50), &[volume]), Some(50));
    }
}
