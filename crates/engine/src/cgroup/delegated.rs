//! The cgroup subtree delegated to an unprivileged user by the service manager. Only v2 has
//! delegation.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};

/// The topmost delegated cgroup above this process's own.
pub(super) fn find() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    path_to(&mounts, &own)?.into_iter().find(|folder| is_delegated(folder))
}

/// The cgroups from the mount down to this process's own.
fn path_to(mountinfo: &str, own: &str) -> Option<Vec<PathBuf>> {
    let own = Path::new(own.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let mount = mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        // The mount must show the root of the hierarchy that `/proc/self/cgroup` refers to.
        let mut fields = left.split(' ').skip(3);
        let is_root = fields.next()? == "/";
        (is_root && right.starts_with("cgroup2 ")).then(|| fields.next().map(PathBuf::from))?
    })?;
    let mut folders = vec![mount.clone()];
    folders.extend(
        own.ancestors().filter(|part| !part.as_os_str().is_empty()).map(|part| mount.join(part)),
    );
    folders[1..].reverse();
    Some(folders)
}

/// Whether this process may create cgroups with limits there and move its processes into them.
fn is_delegated(folder: &Path) -> bool {
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
    let controllers = read("cgroup.controllers");
    let has = |name: &str| controllers.split_whitespace().any(|word| word == name);
    let may = |file: &str| access(folder.join(file), Access::WRITE_OK).is_ok();
    has("memory")
        && has("pids")
        && ["", "cgroup.procs", "cgroup.subtree_control"].iter().all(|file| may(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestor_cgroups_are_listed_from_the_top() {
        let mounts = "1 2 0:1 / /c/memory rw - cgroup cgroup rw,memory\n\
            3 2 0:2 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        let found = path_to(mounts, "4:memory:/x\n0::/user.slice/me.service/app\n").unwrap();
        let expected = ["", "/user.slice", "/user.slice/me.service", "/user.slice/me.service/app"];
        assert_eq!(found, expected.map(|part| PathBuf::from(format!("/sys/fs/cgroup{part}"))));
        assert_eq!(path_to(mounts, "0::/\n").unwrap(), [Path::new("/sys/fs/cgroup")]);
        assert_eq!(path_to("", "0::/\n"), None);
    }
}
