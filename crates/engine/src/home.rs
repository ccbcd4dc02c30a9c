//! The configuration and the folders of a home.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use harvest_proto::SandboxId;

use crate::{
    disk_thresholds::Thresholds,
    error::{AtPath, EngineError},
    records::{create_private_dir, hex},
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

/// Declares accessors of folders: the name, the accessor of the parent, the folder's name in it.
macro_rules! folders {
    ($($(#[$doc:meta])* $name:ident = $parent:ident / $folder:literal;)*) => {
        $($(#[$doc])*
        pub(crate) fn $name(&self) -> std::path::PathBuf {
            self.$parent().join($folder)
        })*
    };
}
pub(crate) use folders;

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

    folders! {
        /// The folder of sockets; accessible to root only.
        run = path / "run";
        sandboxes = root / "sandboxes";
        /// Volumes; always on the home's own file system, also with a store in a file.
        volumes = path / "volumes";
        layers = root / "layers";
        snapshots = root / "snapshots";
        /// One empty file for each snapshot that is not durable yet.
        unsynced = root / "unsynced";
        /// Layers being written. Outside of a capture, an entry is left from a crash.
        partial = root / "partial";
        trash = root / "trash";
        /// The trash on the home's own file system; another one than `trash` for a store in a file.
        host_trash = path / "trash";
        zygote_socket = run / "zygote.sock";
    }

    pub(crate) fn sandbox_run(&self, id: &SandboxId) -> PathBuf {
        self.run().join(id.part())
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.part())
    }

    /// The folder with a sandbox's `upper` and `work`.
    pub(crate) fn writable(&self, id: &SandboxId) -> PathBuf {
        writable::folder(&self.sandbox(id), self.store)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_home_has_its_own_cgroup() {
        assert_ne!(
            Home::new("/a".into(), StoreKind::Dir).cgroup_name(),
            Home::new("/b".into(), StoreKind::Dir).cgroup_name()
        );
    }
}
