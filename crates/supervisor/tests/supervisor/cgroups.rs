//! Real cgroups v2 as in a sandbox. Even a host with its controllers on v1 has such a mount, and
//! `cgroup.kill` works without controllers.

use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::PathBuf,
};

use harvest_proto::launch::Descriptor;

use crate::harness::{kill, wait_until};

/// A cgroup with the children `agent` and `commands`; removed on drop.
pub(crate) struct Cgroups(PathBuf);

impl Cgroups {
    /// `None` on a host without a cgroup v2 mount.
    pub(crate) fn create() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        let name = format!("harvest-supervisor-{}", harvest_proto::SandboxId::random().part());
        let groups = Self(PathBuf::from(line.split(' ').nth(4)?).join(name));
        for name in ["", "agent", "commands"] {
            fs::create_dir(groups.0.join(name)).unwrap();
        }
        Some(groups)
    }

    /// The descriptors for the launch.
    pub(crate) fn descriptors(&self) -> Vec<(Descriptor, OwnedFd)> {
        let open = |name: &str, write: bool| {
            OwnedFd::from(
                File::options().write(write).read(!write).open(self.0.join(name)).unwrap(),
            )
        };
        vec![
            (Descriptor::JoinCommands, open("commands/cgroup.procs", true)),
            (Descriptor::JoinAgent, open("agent/cgroup.procs", true)),
            (Descriptor::AgentProcs, open("agent/cgroup.procs", false)),
            (Descriptor::AgentKill, open("agent/cgroup.kill", true)),
        ]
    }

    pub(crate) fn members(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.0.join(name).join("cgroup.procs")).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn add(&self, name: &str, pid: u32) {
        fs::write(self.0.join(name).join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for name in ["agent", "commands", ""] {
            for pid in self.members(name) {
                kill(&pid);
            }
            wait_until("the cgroup is empty", || fs::remove_dir(self.0.join(name)).is_ok());
        }
    }
}
