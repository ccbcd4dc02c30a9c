//! Volumes: named places that outlive sandboxes and are in no snapshot. This file keeps their records
//! and says who may have one; what a volume is made of is the business of `image`.
//!
//! A volume is a folder `volumes/NAME` with its record, made under another name and renamed when it is
//! whole. A lock beside it is held while it is made, mounted or removed, never while it is in use: that
//! is told by the kernel, which knows of every mount, whoever has died.

mod image;
pub(crate) mod state;

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use harvest_proto::Timestamp;
use rustix::fs::{AtFlags, CWD, FlockOperation, Gid, Mode, Uid};
use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError, disk,
    error::AtPath,
    home::{Survives, read_record, sync, write_record},
    rootless,
    spec::{VolumeMount, is_plain_name},
    syscall,
    zygote::{client, protocol::Request},
};

/// Who a volume and its folders belong to inside: the user agents and commands run as.
const OWNER: u32 = 10_001;

// Room every host needs for itself: a log, a package, a snapshot of what runs.
const MARGIN_BYTES: u64 = 1 << 30;
const SMALLEST_BYTES: u64 = 4 << 20;
const LARGEST_BYTES: u64 = 1 << 44;

/// Names a volume: the name of its folder.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName(String);

impl VolumeName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VolumeName {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if is_plain_name(text) {
            return Ok(Self(text.to_owned()));
        }
        let reason =
            format!("`{text}` is no name for a volume: letters, digits, `_` and `-`, at most 80");
        Err(EngineError::Invalid { reason })
    }
}

impl TryFrom<String> for VolumeName {
    type Error = EngineError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<VolumeName> for String {
    fn from(name: VolumeName) -> Self {
        name.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl fmt::Debug for VolumeName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// A volume to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSpec {
    /// Its name.
    pub name: VolumeName,
    /// What it takes on the host's disk from the beginning; a little less fits into it.
    pub size_bytes: u64,
    /// How many files, folders and links it can hold, at least.
    pub files: u64,
    /// Folders it has whenever a sandbox gets it.
    pub folders: Vec<String>,
}

impl VolumeSpec {
    /// 2 GiB for 500,000 files.
    #[must_use]
    pub const fn new(name: VolumeName) -> Self {
        Self { name, size_bytes: 2 << 30, files: 500_000, folders: Vec::new() }
    }
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Its name.
    pub name: VolumeName,
    /// What it is made of.
    pub backing: Backing,
    /// Its size.
    pub size_bytes: u64,
    /// How many files it can hold.
    pub files: u64,
    /// Folders it has whenever a sandbox gets it.
    pub folders: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// What a volume is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// A file system in a file, with limits the kernel keeps.
    Image,
    /// A plain folder, for who may not mount: nothing keeps its limits.
    Folder,
}

impl Engine {
    /// Makes a volume. Its room is taken on the host's disk now, so that it never runs out later.
    ///
    /// # Errors
    /// When the name is taken, the sizes make no sense or the host lacks the room.
    pub fn volume_create(&self, spec: &VolumeSpec) -> Result<Volume, EngineError> {
        check(spec)?;
        let _lock = self.volume_lock(&spec.name)?;
        if self.volume(&spec.name)?.is_some() {
            return Err(EngineError::VolumeExists { volume: spec.name.clone() });
        }
        self.volume_make(spec)
    }

    /// Every volume, by name.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn volumes(&self) -> Result<Vec<Volume>, EngineError> {
        let mut volumes = Vec::new();
        for name in disk::names_in(&self.home.volumes())? {
            if let Ok(name) = name.parse() {
                volumes.extend(self.volume(&name)?);
            }
        }
        volumes.sort_by(|one: &Volume, other| one.name.cmp(&other.name));
        Ok(volumes)
    }

    /// A volume, if there is one of this name.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn volume(&self, name: &VolumeName) -> Result<Option<Volume>, EngineError> {
        read_record(&self.volume_folder(name).join("record.json"))
    }

    /// Throws a volume away with everything in it. Idempotent.
    ///
    /// # Errors
    /// When a sandbox has it.
    pub fn volume_remove(&self, name: &VolumeName) -> Result<(), EngineError> {
        let lock = self.volume_lock(name)?;
        let folder = self.volume_folder(name);
        if let Some(volume) = self.volume(name)? {
            let in_use = match volume.backing {
                Backing::Image => {
                    // It may keep it at hand for the next sandbox.
                    let release = Request::Release { volume: name.clone() };
                    client::ask_if_there(&self.home, &release)?;
                    image::is_in_use(&folder)?
                }
                Backing::Folder => self.is_mounted_by_record(name)?,
            };
            if in_use {
                return Err(EngineError::VolumeInUse { volume: name.clone() });
            }
        }
        // Gone at once, and its room a moment later; cut short in between, it is swept as half-made.
        let old = self.home.volumes().join(format!("{NEW}{name}"));
        self.home.discard(&old)?;
        match fs::rename(&folder, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => {
                result.at("remove", &folder)?;
                fs::remove_dir_all(&old).at("remove", &old)?;
            }
        }
        // While it is locked: who waits for it looks whether it is there still.
        fs::remove_file(&lock.path).at("remove", &lock.path)
    }

    /// The records of what a spec asks for, all of them there and somewhere sensible.
    pub(crate) fn volumes_of(&self, mounts: &[VolumeMount]) -> Result<Vec<Volume>, EngineError> {
        let mut places = BTreeSet::new();
        mounts
            .iter()
            .map(|mount| {
                check_place(&mount.inside)?;
                if !places.insert(&mount.inside) {
                    let reason = format!("two volumes at `{}`", mount.inside.display());
                    return Err(EngineError::Invalid { reason });
                }
                self.volume(&mount.name)?
                    .ok_or_else(|| EngineError::VolumeMissing { volume: mount.name.clone() })
            })
            .collect()
    }

    /// The volume's root, mounted nowhere: it goes when its last holder goes, however that is.
    pub(crate) fn volume_attach(&self, name: &VolumeName) -> Result<OwnedFd, EngineError> {
        let _lock = self.volume_lock(name)?;
        let missing = || EngineError::VolumeMissing { volume: name.clone() };
        let volume = self.volume(name)?.ok_or_else(missing)?;
        let folder = self.volume_folder(name);
        let root = match volume.backing {
            Backing::Image => image::mount(&volume, &folder)?,
            Backing::Folder => {
                let files = folder.join(FILES);
                syscall::tree(CWD, &files, false).at("open", files)?
            }
        };
        furnish(&root, &volume.folders).at("furnish", folder)?;
        Ok(root)
    }

    /// Throws away what a crash left half-made.
    pub(crate) fn volumes_sweep(&self) -> Result<(), EngineError> {
        for entry in disk::names_in(&self.home.volumes())? {
            let Some(Ok(name)) = entry.strip_prefix(NEW).map(str::parse::<VolumeName>) else {
                continue;
            };
            let _lock = self.volume_lock(&name)?;
            self.home.discard(&self.home.volumes().join(entry))?;
        }
        Ok(())
    }

    fn volume_folder(&self, name: &VolumeName) -> PathBuf {
        self.home.volumes().join(name.as_str())
    }

    /// Made under another name: what has the volume's own is whole.
    fn volume_make(&self, spec: &VolumeSpec) -> Result<Volume, EngineError> {
        let new = self.home.volumes().join(format!("{NEW}{}", spec.name));
        // We have the lock, so whoever began this one is dead.
        self.home.discard(&new)?;
        fs::DirBuilder::new().mode(0o700).create(&new).at("make", &new)?;
        let made = self.volume_fill(spec, &new).and_then(|volume| {
            let folder = self.volume_folder(&spec.name);
            fs::rename(&new, &folder).at("make", folder)?;
            sync(&self.home.volumes())?;
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
            // Only the host's root may mount a file system of its own making.
            backing: if rootless::is_here() { Backing::Folder } else { Backing::Image },
            size_bytes: spec.size_bytes,
            files: spec.files,
            folders: spec.folders.clone(),
            created_at: std::time::SystemTime::now().into(),
        };
        match volume.backing {
            Backing::Image => {
                enough_room(folder, spec)?;
                image::make(&volume, folder)?;
            }
            Backing::Folder => {
                let files = folder.join(FILES);
                fs::create_dir(&files).at("make", &files)?;
                std::os::unix::fs::chown(&files, Some(OWNER), Some(OWNER)).at("make", files)?;
            }
        }
        write_record(&folder.join("record.json"), &volume, Survives::PowerCut)?;
        Ok(volume)
    }

    fn is_mounted_by_record(&self, name: &VolumeName) -> Result<bool, EngineError> {
        for id in self.list()? {
            let record = crate::sandbox::Record::read(&self.home, &id)?;
            if record.is_some_and(|record| record.volumes.iter().any(|mount| mount.name == *name))
                && matches!(self.find(&id)?, crate::SandboxState::Running(_))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn volume_lock(&self, name: &VolumeName) -> Result<Lock, EngineError> {
        let path = self.home.volumes().join(format!(".lock-{name}"));
        loop {
            let file = disk::lock(&path, FlockOperation::LockExclusive)?;
            let own = file.metadata().at("look at", &path)?;
            // Whoever had it before may have removed the volume, and the lock with it.
            if fs::metadata(&path)
                .is_ok_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino()))
            {
                return Ok(Lock { path, _file: file });
            }
        }
    }
}

/// Held while a volume is made, mounted or removed.
struct Lock {
    path: PathBuf,
    _file: fs::File,
}

/// The beginning of a half-made volume's name, which no volume's can have.
const NEW: &str = ".new-";
/// What a plain folder's volume is in.
const FILES: &str = "files";

/// The size no file may pass: what the disk may hold, or the largest volume where that is larger.
pub(crate) fn largest_file(writable_bytes: Option<u64>, volumes: &[Volume]) -> Option<u64> {
    writable_bytes.map(|bytes| volumes.iter().map(|volume| volume.size_bytes).fold(bytes, u64::max))
}

fn check(spec: &VolumeSpec) -> Result<(), EngineError> {
    let reason = if !(SMALLEST_BYTES..=LARGEST_BYTES).contains(&spec.size_bytes) {
        format!(
            "a volume has between {SMALLEST_BYTES} and {LARGEST_BYTES} bytes, not {}",
            spec.size_bytes
        )
    } else if spec.files == 0 || spec.files > spec.size_bytes / 1024 {
        // Each takes 256 bytes whether it is there or not.
        format!("a volume of {} bytes cannot hold {} files", spec.size_bytes, spec.files)
    } else if let Some(folder) = spec.folders.iter().find(|folder| !is_one_name(folder)) {
        format!("`{folder}` is no name for a folder")
    } else {
        return Ok(());
    };
    Err(EngineError::Invalid { reason })
}

fn is_one_name(text: &str) -> bool {
    let mut parts = Path::new(text).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == text)
}

fn check_place(inside: &Path) -> Result<(), EngineError> {
    let mut parts = inside.components();
    let plain = parts.next() == Some(Component::RootDir)
        && inside.parent().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    let taken = ["/proc", "/dev", "/sys"].iter().any(|place| inside.starts_with(place));
    if plain && !taken {
        return Ok(());
    }
    Err(EngineError::Invalid { reason: format!("a volume cannot be at `{}`", inside.display()) })
}

fn enough_room(folder: &Path, spec: &VolumeSpec) -> Result<(), EngineError> {
    let about = rustix::fs::statvfs(folder).at("look at", folder)?;
    let free_bytes = about.f_bavail.saturating_mul(about.f_frsize);
    let needed_bytes = spec.size_bytes.saturating_add(MARGIN_BYTES);
    if needed_bytes <= free_bytes {
        return Ok(());
    }
    Err(EngineError::NoRoom { what: format!("volume `{}`", spec.name), needed_bytes, free_bytes })
}

/// Puts the folders there that are missing. Whatever else has such a name stays as it is.
fn furnish(root: &OwnedFd, folders: &[String]) -> io::Result<()> {
    for folder in folders {
        match rustix::fs::mkdirat(root, folder, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                let (user, group) = (Uid::from_raw(OWNER), Gid::from_raw(OWNER));
                rustix::fs::chownat(
                    root,
                    folder,
                    Some(user),
                    Some(group),
                    AtFlags::SYMLINK_NOFOLLOW,
                )?;
            }
            // Full of files, of a sandbox's making: that is no reason not to start.
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
    fn a_volume_is_never_put_where_the_sandbox_keeps_its_own() {
        for place in ["/", "", "relative", "/proc", "/dev/shm", "/sys/x", "/a/../proc", "/a/.."] {
            assert!(check_place(Path::new(place)).is_err(), "{place}");
        }
        for place in ["/mnt/state", "/data", "/process"] {
            assert!(check_place(Path::new(place)).is_ok(), "{place}");
        }
    }

    #[test]
    fn a_volume_that_makes_no_sense_is_refused_before_anything_is_made() {
        let spec = VolumeSpec::new("v".parse().unwrap());
        check(&spec).unwrap();
        for wrong in [
            VolumeSpec { size_bytes: 0, ..spec.clone() },
            VolumeSpec { size_bytes: u64::MAX, ..spec.clone() },
            VolumeSpec { files: 0, ..spec.clone() },
            VolumeSpec { files: u64::MAX, ..spec.clone() },
            VolumeSpec { folders: vec!["../x".into()], ..spec.clone() },
            VolumeSpec { folders: vec!["..".into()], ..spec.clone() },
            VolumeSpec { folders: vec![String::new()], ..spec.clone() },
        ] {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
        for name in ["", ".", "a/b", ".new-x", "a b"] {
            assert!(name.parse::<VolumeName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_file_may_be_as_large_as_the_largest_volume() {
        let volume = Volume {
            name: "v".parse().unwrap(),
            backing: Backing::Image,
            size_bytes: 9,
            files: 1,
            folders: Vec::new(),
            created_at: Timestamp::from_millis(0),
        };
        assert_eq!(largest_file(None, std::slice::from_ref(&volume)), None);
        assert_eq!(largest_file(Some(5), std::slice::from_ref(&volume)), Some(9));
        assert_eq!(largest_file(Some(50), &[volume]), Some(50));
    }
}
