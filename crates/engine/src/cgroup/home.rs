//! The cgroup of a home: one for its zygote and one for each sandbox.

use std::{
    fs, io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use super::{Hierarchy, layout::make_folder, processes};
use crate::error::{Doing, StepError};

// Cgroup for a container's own processes when its root cgroup gets children.
const OTHER_PROCESSES: &str = "harvest-others";
// A process that is being forked or is dying appears in no list but still blocks enabling
// controllers.
const ENABLE_TIMEOUT: Duration = Duration::from_secs(2);
impl Hierarchy {
    /// Creates the cgroup of a home with one for its zygote, and moves the caller there.
    pub(crate) fn enter_home(&self, home: &str) -> Result<(), StepError> {
        for mount in self.mounts() {
            let group = mount.join(home);
            if matches!(self, Self::V2 { .. }) {
                enable_at_mount(mount)?;
                make_folder(&group)?;
                enable_controllers(&group).doing(|| enabling(&group))?;
            }
            make_folder(&group)?;
            let zygote = group.join("zygote");
            make_folder(&zygote)?;
            let procs = zygote.join("cgroup.procs");
            fs::write(&procs, "0").doing(|| format!("join {}", procs.display()))?;
        }
        Ok(())
    }

    /// Leaves the cgroup of a home and removes it, unless it still contains sandboxes.
    pub(crate) fn leave_home(&self, home: &str) {
        for mount in self.mounts() {
            let back = |folder: &Path| fs::write(folder.join("cgroup.procs"), "0").is_ok();
            let others = mount.join(OTHER_PROCESSES);
            // A cgroup with enabled controllers accepts no processes.
            let _ = back(mount) || (make_folder(&others).is_ok() && back(&others));
            let _ = fs::remove_dir(mount.join(home).join("zygote"));
            let _ = fs::remove_dir(mount.join(home));
        }
    }

    /// The id parts of the sandboxes that have a cgroup in this home.
    pub(crate) fn parts(&self, home: &str) -> Vec<String> {
        let mut parts: Vec<String> = Vec::new();
        for mount in self.mounts() {
            let entries = fs::read_dir(mount.join(home)).into_iter().flatten().flatten();
            let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            parts.extend(folders.filter_map(|entry| entry.file_name().into_string().ok()));
        }
        parts.sort();
        parts.dedup();
        parts.retain(|part| part != "zygote");
        parts
    }
}

/// Enables controllers for the children of a v2 cgroup. The host's root allows that at any time. In
/// a container the visible root is an ordinary cgroup with the container's processes in it, and the
/// kernel allows processes only in leaves, so they are moved into one. They stay within the
/// container's limits.
fn enable_at_mount(mount: &Path) -> Result<(), StepError> {
    let busy = |result: &io::Result<()>| {
        result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    };
    let mut result = enable_controllers(mount);
    let end = Instant::now() + ENABLE_TIMEOUT;
    while busy(&result) && Instant::now() < end {
        let others = mount.join(OTHER_PROCESSES);
        make_folder(&others)?;
        for pid in processes(mount) {
            let _ = fs::write(others.join("cgroup.procs"), pid.as_raw_nonzero().to_string());
        }
        result = enable_controllers(mount);
        if busy(&result) {
            thread::sleep(Duration::from_millis(1));
        }
    }
    if busy(&result) {
        let why = "it contains processes that cannot be moved; \
            give Harvest a cgroup of its own (systemd: Delegate=yes, docker: --cgroupns=private)";
        return Err(StepError::new(
            format!("enable controllers in the cgroup {}", mount.display()),
            io::Error::new(io::ErrorKind::ResourceBusy, why),
        ));
    }
    result.doing(|| enabling(mount))
}

fn enable_controllers(folder: &Path) -> io::Result<()> {
    let file = folder.join("cgroup.subtree_control");
    fs::write(&file, "+memory +pids")?;
    let _ = fs::write(&file, "+cpu");
    Ok(())
}

fn enabling(folder: &Path) -> String {
    format!("enable memory and pids in {} (is it delegated and writable?)", folder.display())
}
