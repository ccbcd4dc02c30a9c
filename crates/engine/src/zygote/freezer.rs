//! Freezes, thaws and kills the commands of sandboxes: through their cgroup or, where an
//! unprivileged user has none, through an order to pid 1, which signals everything below it but not
//! itself.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, launch::FREEZE_SIGNAL};
use rustix::process::{Signal, pidfd_send_signal};

use crate::{
    cgroup::Hierarchy,
    error::{Doing, StepError},
    home::Home,
    isolate::FREEZE_FILE,
};

// The actions of an order; see `Descriptor::FreezeOrders`.
const THAW: u64 = 0;
const FREEZE: u64 = 1;
const KILL: u64 = 2;

const CLEAR_TIMEOUT: Duration = Duration::from_secs(1);

/// A home and the cgroups of its sandboxes: freezes, thaws and kills their work.
pub(super) struct HomeCgroups {
    pub(super) home: Home,
    pub(super) hierarchy: Hierarchy,
    pub(super) group: String,
}

impl HomeCgroups {
    /// Requests a freeze or a thaw; [`HomeCgroups::is_frozen`] tells when a freeze is complete.
    pub(super) fn freeze(
        &self,
        id: &SandboxId,
        cgroup: &str,
        pidfd: &OwnedFd,
        frozen: bool,
    ) -> Result<(), StepError> {
        if self.hierarchy != Hierarchy::None {
            return self.hierarchy.freeze(&self.group, cgroup, frozen);
        }
        let action = if frozen { FREEZE } else { THAW };
        self.send_order(id, pidfd, action).doing(|| "tell pid 1 to freeze its commands")
    }

    /// Kills all processes that pid 1 has started; true when done. See [`Hierarchy::kill_work`].
    pub(super) fn kill_work(
        &self,
        id: &SandboxId,
        cgroup: &str,
        pidfd: &OwnedFd,
        keep_frozen: bool,
    ) -> bool {
        if self.hierarchy != Hierarchy::None {
            return self.hierarchy.kill_work(&self.group, cgroup, keep_frozen);
        }
        // One signal reaches all processes at once, so none escapes and none needs a second look.
        self.send_order(id, pidfd, KILL).is_ok()
    }

    fn send_order(&self, id: &SandboxId, pidfd: &OwnedFd, action: u64) -> io::Result<()> {
        let orders = File::options().read(true).write(true).open(self.orders(id))?;
        let order = read_number(&orders, 0)?;
        // Renewing a freeze is no new order.
        let order = if order % 4 == action && action != KILL {
            order
        } else {
            (order / 4 + 1) * 4 + action
        };
        orders.write_all_at(&order.to_ne_bytes(), 0)?;
        let signal = Signal::from_named_raw(FREEZE_SIGNAL).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_send_signal(pidfd, signal)?)
    }

    /// Whether all processes that pid 1 has started are frozen.
    pub(super) fn is_frozen(&self, id: &SandboxId, cgroup: &str, pid: u32) -> bool {
        if self.hierarchy != Hierarchy::None {
            return self.hierarchy.is_frozen(&self.group, cgroup);
        }
        let is_done = || -> io::Result<bool> {
            let orders = File::open(self.orders(id))?;
            Ok(read_number(&orders, 0)? == read_number(&orders, 8)?)
        };
        is_done().unwrap_or(false) && all_stopped(pid)
    }

    /// Kills what is left in a sandbox's cgroups and removes them; true when none is left.
    pub(super) fn clear(&self, cgroup: &str) -> bool {
        self.hierarchy.clear(&self.group, cgroup)
    }

    /// [`HomeCgroups::clear`] until it succeeds, as all processes are dying. Bounded: a process may
    /// hang in the kernel.
    pub(super) fn clear_with_timeout(&self, cgroup: &str) {
        let end = Instant::now() + CLEAR_TIMEOUT;
        while !self.clear(cgroup) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn orders(&self, id: &SandboxId) -> PathBuf {
        self.home.sandbox(id).join(FREEZE_FILE)
    }
}

fn read_number(orders: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    orders.read_exact_at(&mut bytes, at).map(|()| u64::from_ne_bytes(bytes))
}

/// Whether all descendants of a process are stopped or dead. All are stopped at once, so none
/// escapes between two looks.
fn all_stopped(root: u32) -> bool {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let about = pid.and_then(|pid| Some((pid, stat(&format!("/proc/{pid}/stat"))?)));
        if let Some((pid, (_, parent))) = about {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut pending = vec![root];
    while let Some(parent) = pending.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            let tasks = fs::read_dir(format!("/proc/{child}/task")).into_iter().flatten().flatten();
            let mut states = tasks.filter_map(|task| stat(task.path().join("stat").to_str()?));
            if !states.all(|(state, _)| matches!(state, 'T' | 't' | 'Z' | 'X')) {
                return false;
            }
            pending.push(child);
        }
    }
    true
}

/// State and parent pid of a process or thread.
fn stat(path: &str) -> Option<(char, u32)> {
    let text = fs::read_to_string(path).ok()?;
    // The command name may contain anything; the fields after the last parenthesis are the
    // kernel's.
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
