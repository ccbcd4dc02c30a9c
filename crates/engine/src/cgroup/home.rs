//! The cgroup of a home: its zygote's place, and all sandboxes below it.

use std::{
    fs, io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use super::{Hierarchy, layout::make_folder, processes};
use crate::error::{Doing, StepError};

// Where a container's own processes go when its root cgroup is divided.
const OTHERS: &str = "harvest-others";
// A process that was just being born or is dying is in no list and still keeps a cgroup from being divided.
const DIVIDE: Duration = Duration::from_secs(2);
impl Hierarchy {
    /// Makes the cgroup of a home with one for its zygote, and moves the caller there.
    pub(crate) fn enter_home(&self, home: &str) -> Result<(), StepError> {
        for mount in self.mounts() {
            let group = mount.join(home);
            if matches!(self, Self::V2 { .. }) {
                divide(mount)?;
                make_folder(&group)?;
                hand_down(&group).doing(|| handing_down(&group))?;
            }
            make_folder(&group)?;
            let zygote = group.join("zygote");
            make_folder(&zygote)?;
            let procs = zygote.join("cgroup.procs");
            fs::write(&procs, "0").doing(|| format!("join {}", procs.display()))?;
        }
        Ok(())
    }

    /// Leaves the cgroup of a home and removes it, unless sandboxes are left in it.
    pub(crate) fn leave_home(&self, home: &str) {
        for mount in self.mounts() {
            let back = |folder: &Path| fs::write(folder.join("cgroup.procs"), "0").is_ok();
            let others = mount.join(OTHERS);
            // A cgroup that was handed down and is divided takes nobody back.
            let _ = back(mount) || (make_folder(&others).is_ok() && back(&others));
            let _ = fs::remove_dir(mount.join(home).join("zygote"));
            let _ = fs::remove_dir(mount.join(home));
        }
    }

    /// The parts of the sandboxes that have a cgroup under this home.
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

/// Lets a v2 cgroup be divided. The host's root always can; in a container the root that is seen is an
/// ordinary cgroup and holds the container's processes, which the kernel allows in leaves only: there they
/// are moved into one. They stay within the container's limits.
fn divide(mount: &Path) -> Result<(), StepError> {
    let busy = |result: &io::Result<()>| {
        result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    };
    let mut result = hand_down(mount);
    let end = Instant::now() + DIVIDE;
    while busy(&result) && Instant::now() < end {
        let others = mount.join(OTHERS);
        make_folder(&others)?;
        for pid in processes(mount) {
            let _ = fs::write(others.join("cgroup.procs"), pid.as_raw_nonzero().to_string());
        }
        result = hand_down(mount);
        if busy(&result) {
            thread::sleep(Duration::from_millis(1));
        }
    }
    if busy(&result) {
        let why = "processes live in it that cannot be moved; \
            give Harvest a cgroup of its own (systemd: Delegate=yes, docker: --cgroupns=private)";
        return Err(StepError::new(
            format!("divide the cgroup {}", mount.display()),
            io::Error::new(io::ErrorKind::ResourceBusy, why),
        ));
    }
    result.doing(|| handing_down(mount))
}

fn hand_down(folder: &Path) -> io::Result<()> {
    let file = folder.join("cgroup.subtree_control");
    fs::write(&file, "+memory +pids")?;
    let _ = fs::write(&file, "+cpu");
    Ok(())
}

fn handing_down(folder: &Path) -> String {
    format!("hand memory and pids down in {} (is it delegated and writable?)", folder.display())
}
