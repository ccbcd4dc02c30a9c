//! The fixture: a sandbox's disk on a real overlay, without processes.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fmt::Write as _,
    fs,
    os::unix::fs::MetadataExt,
    panic,
    path::{Path, PathBuf},
    thread,
};

use harvest_proto::{SandboxId, SnapshotId};
use rustix::{
    mount::{MountFlags, MountPropagationFlags},
    thread::UnshareFlags,
};

use super::super::*;
use crate::disk::tests::Temporary;

pub(super) const BASE: &str = "baselayer";

/// A sandbox's disk without its processes.
pub(super) struct TestDisk {
    pub(super) disk: Temporary,
    pub(super) sandbox: SandboxDisk,
}

impl TestDisk {
    pub(super) fn new() -> Self {
        let disk = Disk::temporary();
        let base = disk.home.layers().join(BASE);
        fs::create_dir_all(base.join("a/b")).unwrap();
        fs::create_dir_all(base.join("d/e")).unwrap();
        for file in ["f", "a/f", "a/b/f", "d/e/f", "c"] {
            fs::write(base.join(file), file).unwrap();
        }
        let sandbox = SandboxDisk {
            id: SandboxId::random(),
            layers: vec![BASE.parse().unwrap()],
            config: ImageConfig::default(),
            parent: None,
            limit: None,
            of_sessions: false,
            boot: crate::process::boot_id().to_owned(),
        };
        let folder = disk.home.sandbox(&sandbox.id);
        for part in ["upper", "work", "merged"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        Self { disk, sandbox }
    }

    pub(super) fn path(&self, part: &str) -> PathBuf {
        self.disk.home.sandbox(&self.sandbox.id).join(part)
    }

    pub(super) fn mount(&self) {
        let options = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=nofollow,index=off,metacopy=off",
            self.disk.home.layers().join(BASE).display(),
            self.path("upper").display(),
            self.path("work").display()
        );
        mount_overlay(&self.path("merged"), &options);
    }

    pub(super) fn capture(&self) -> Result<Captured, EngineError> {
        self.capture_as(&SnapshotId::random())
    }

    pub(super) fn capture_as(&self, id: &SnapshotId) -> Result<Captured, EngineError> {
        self.disk.capture(
            &self.sandbox,
            id,
            &FreezeControl { is_running: true, freeze: &|| Ok(()), thaw: &|| Ok(()) },
        )
    }

    pub(super) fn save_as(&self, id: &SnapshotId) -> Result<Snapshot, EngineError> {
        let exists = self.path("").exists();
        let sandbox = exists.then_some(&self.sandbox);
        self.disk.save_stopped(&self.sandbox.id, sandbox, id, &|| {
            trash::move_to_trash(&self.disk.home.sandbox(&self.sandbox.id), &self.disk.home.trash())
        })
    }

    pub(super) fn merged_view(&self, snapshot: &Snapshot) -> BTreeMap<PathBuf, String> {
        let layers: Vec<_> = snapshot
            .layers
            .iter()
            .rev()
            .map(|layer| self.disk.layer_path(layer).unwrap().display().to_string())
            .collect();
        let at = self.disk.home.path().join("view");
        fs::create_dir_all(&at).unwrap();
        // Overlayfs needs two lower layers when there is no upper one.
        let empty = self.disk.home.path().join("empty");
        fs::create_dir_all(&empty).unwrap();
        mount_overlay(&at, &format!("lowerdir={}:{}", layers.join(":"), empty.display()));
        let view = describe(&at);
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
        view
    }
}

impl Drop for TestDisk {
    fn drop(&mut self) {
        // Most are never mounted; a mounted one could not be deleted.
        let _ = rustix::mount::unmount(self.path("merged"), rustix::mount::UnmountFlags::DETACH);
    }
}

pub(super) fn mount_overlay(at: &Path, options: &str) {
    let options = CString::new(options).unwrap();
    rustix::mount::mount("overlay", at, "overlay", MountFlags::empty(), Some(options.as_c_str()))
        .unwrap();
}

/// Runs in a new mount namespace, which ends with the thread.
pub(super) fn in_mount_namespace<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let run = thread::spawn(|| {
        // SAFETY: only this thread's mount namespace changes; descriptors stay shared.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).unwrap();
        run()
    });
    run.join().unwrap_or_else(|cause| panic::resume_unwind(cause))
}

/// Everything visible of a tree, one line per path.
pub(super) fn describe(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut lines = BTreeMap::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let meta =
            fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut line = format!("{:o} {}:{}", meta.mode(), meta.uid(), meta.gid());
        if meta.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if meta.is_symlink() {
            write!(line, " -> {}", fs::read_link(&path).unwrap().display()).unwrap();
        } else if meta.is_file() {
            write!(line, " {}.{} {:?}", meta.mtime(), meta.mtime_nsec(), fs::read(&path).unwrap())
                .unwrap();
        }
        lines.insert(path.strip_prefix(root).unwrap().to_owned(), line);
    }
    lines
}
