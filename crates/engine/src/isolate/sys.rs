//! `/sys` inside: the sandbox's own cgroups, read-only, and files that show its limits. Nothing of
//! the host.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags, openat, symlinkat},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsmount,
        fsopen,
    },
};

use super::mounts::{READ_ONLY, RootTree, empty_tmpfs, new};
use crate::{cgroup::CgroupView, rootless, syscall};

impl RootTree {
    /// A `/sys` with these cgroups, writable until [`RootTree::finish_sys`].
    pub(crate) fn sys(&self, view: &CgroupView) -> io::Result<()> {
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let sys = new("tmpfs", &[("mode", "0755"), ("size", "256k")], flags)?;
        self.on_folder(&sys, Path::new("/sys"))?;
        for (inside, group) in &view.groups {
            match self.cgroup(group, inside) {
                // Delegation does not always include the right to mount.
                Err(_) if rootless::is_active() => {}
                result => result?,
            }
        }
        for (inside, target) in &view.links {
            let parent = self.folder(inside.parent().unwrap_or(Path::new("/sys")))?;
            symlinkat(target, parent, inside.file_name().unwrap_or_default())?;
        }
        let hierarchies = std::fs::read_to_string("/proc/cgroups").unwrap_or_default();
        for name in view.empty_controllers.iter().filter(|name| is_mounted(&hierarchies, name)) {
            // The host may have the controller together with another one.
            if let Ok(controller) = mount_controller(name) {
                let inside = Path::new("/sys/fs/cgroup").join(name);
                self.on_folder(&controller, &inside)?;
                self.on_folder(&empty_tmpfs()?, &inside)?;
            }
        }
        Ok(())
    }

    fn cgroup(&self, group: &Path, inside: &Path) -> io::Result<()> {
        let tree = syscall::clone_mount(CWD, group, false)?;
        syscall::set_mount_attributes(&tree, READ_ONLY | libc::MOUNT_ATTR_NOEXEC, None)?;
        self.on_folder(&tree, inside)
    }

    /// Writes files into `/sys` and makes it read-only.
    pub(crate) fn finish_sys(&self, files: &BTreeMap<PathBuf, String>) -> io::Result<()> {
        let sys = Path::new("/sys");
        for (path, text) in files {
            let path = sys.join(path);
            let parent = self.folder(path.parent().unwrap_or(sys))?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let name = path.file_name().unwrap_or_default();
            let file = openat(parent, name, flags, Mode::from_raw_mode(0o444))?;
            std::fs::File::from(file).write_all(text.as_bytes())?;
        }
        syscall::set_mount_attributes(self.folder(sys)?, libc::MOUNT_ATTR_RDONLY, None)
    }
}

/// Whether the host has mounted a v1 controller, by the text of `/proc/cgroups`. Mounting another
/// one would create its hierarchy on the host.
fn is_mounted(hierarchies: &str, name: &str) -> bool {
    hierarchies.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some(name) && words.next().is_some_and(|hierarchy| hierarchy != "0")
    })
}

/// A v1 controller's mount.
fn mount_controller(name: &str) -> io::Result<OwnedFd> {
    let context = fsopen("cgroup", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_flag(context.as_fd(), name)?;
    fsconfig_create(context.as_fd())?;
    let flags = MountAttrFlags::MOUNT_ATTR_RDONLY;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_existing_hierarchies_are_mounted() {
        let hierarchies = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n\
                           cpuset\t0\t1\t1\ncpu\t4\t12\t1\ncpuacct\t4\t12\t1\n";
        let mounted =
            ["cpuset", "cpu", "cpuacct", "pids"].map(|name| is_mounted(hierarchies, name));
        assert_eq!(mounted, [false, true, true, false]);
    }
}
