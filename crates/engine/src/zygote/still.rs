//! Makes a sandbox's commands stand still and go on: by their cgroup, or, for an ordinary user who has
//! none, by an order to pid 1, which stops everything below it and not itself.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::PathBuf,
};

use harvest_proto::{SandboxId, launch::STILL_SIGNAL};
use rustix::process::{Signal, pidfd_send_signal};

use crate::{
    cgroup::Hierarchy,
    error::{Doing, StepError},
    home::Home,
    isolate::STILL,
};

// What an order is about: the numbers of `Descriptor::Still`.
const GO_ON: u64 = 0;
const STAND_STILL: u64 = 1;
const DIE: u64 = 2;

/// Makes the work in the sandboxes of one home stand still, go on or end.
pub(super) struct Brake {
    pub(super) home: Home,
    pub(super) cgroups: Hierarchy,
    pub(super) group: String,
}

impl Brake {
    /// Asks for standing still or going on; see [`Brake::has_stopped`].
    pub(super) fn freeze(
        &self,
        id: &SandboxId,
        pidfd: &OwnedFd,
        frozen: bool,
    ) -> Result<(), StepError> {
        if self.cgroups != Hierarchy::None {
            return self.cgroups.freeze(&self.group, id.part(), frozen);
        }
        let wish = if frozen { STAND_STILL } else { GO_ON };
        self.tell(id, pidfd, wish).doing(|| "tell pid 1 to stop its commands".to_owned())
    }

    /// Kills all that pid 1 has started; true when it is done. `frozen` when a freeze is to outlast this.
    pub(super) fn kill_work(&self, id: &SandboxId, pidfd: &OwnedFd, frozen: bool) -> bool {
        if self.cgroups != Hierarchy::None {
            return self.cgroups.kill_work(&self.group, id.part(), frozen);
        }
        // One signal to everyone at once: none can get away, and none has to be sought again.
        self.tell(id, pidfd, DIE).is_ok()
    }

    fn tell(&self, id: &SandboxId, pidfd: &OwnedFd, wish: u64) -> io::Result<()> {
        let orders = File::options().read(true).write(true).open(self.orders(id))?;
        let order = number(&orders, 0)?;
        // A freeze that is renewed is no new order.
        let order =
            if order % 4 == wish && wish != DIE { order } else { (order / 4 + 1) * 4 + wish };
        orders.write_all_at(&order.to_ne_bytes(), 0)?;
        let signal = Signal::from_named_raw(STILL_SIGNAL).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_send_signal(pidfd, signal)?)
    }

    /// Whether all that pid 1 has started stands still.
    pub(super) fn has_stopped(&self, id: &SandboxId, pid: u32) -> bool {
        if self.cgroups != Hierarchy::None {
            return self.cgroups.is_frozen(&self.group, id.part());
        }
        let obeyed = || -> io::Result<bool> {
            let orders = File::open(self.orders(id))?;
            Ok(number(&orders, 0)? == number(&orders, 8)?)
        };
        obeyed().unwrap_or(false) && all_stopped(pid)
    }

    fn orders(&self, id: &SandboxId) -> PathBuf {
        self.home.sandbox(id).join(STILL)
    }
}

fn number(orders: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    orders.read_exact_at(&mut bytes, at).map(|()| u64::from_ne_bytes(bytes))
}

/// Whether everything below a process is stopped or dead. All of it is stopped at once, so that nothing
/// can slip away between two looks.
fn all_stopped(root: u32) -> bool {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let about = pid.and_then(|pid| Some((pid, stat(&format!("/proc/{pid}/stat"))?)));
        if let Some((pid, (_, parent))) = about {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            let tasks = fs::read_dir(format!("/proc/{child}/task")).into_iter().flatten().flatten();
            let mut states = tasks.filter_map(|task| stat(task.path().join("stat").to_str()?));
            if !states.all(|(state, _)| matches!(state, 'T' | 't' | 'Z' | 'X')) {
                return false;
            }
            open.push(child);
        }
    }
    true
}

/// The state and the parent of a process or thread.
fn stat(path: &str) -> Option<(char, u32)> {
    let text = fs::read_to_string(path).ok()?;
    // The program's name may hold anything; what follows the last parenthesis is the kernel's.
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
