//! The sandbox from inside: its users, environment variables, processes and cgroups. Everything
//! that runs a process starts here.

use std::{cell::RefCell, collections::BTreeMap, os::fd::OwnedFd, rc::Rc};

use harvest_proto::{
    bridge::{Exit, Fault},
    launch::Launch,
};

use crate::{
    cgroup::{AgentGroup, OomCount},
    detached::Detached,
    door::ModelActivity,
    meminfo::Meminfo,
    processes::{ProcessExit, ProcessSpec, Processes},
    sync::SyncProgress,
    users::{self, User},
};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// An image may set this variable to another folder for checkouts; ours do not.
const WORKSPACE_VARIABLE: &str = "HARVEST_WORKSPACE";
const WORKSPACE: &str = "/workspace";

pub(crate) struct Sandbox {
    pub(crate) launch: Launch,
    /// The environment variables of the session, once it has booted.
    pub(crate) session_env: RefCell<BTreeMap<String, String>>,
    pub(crate) processes: Rc<Processes>,
    pub(crate) agent_group: AgentGroup,
    pub(crate) oom: OomCount,
    /// Nothing where the sandbox sees the host's memory.
    pub(crate) meminfo: Option<Meminfo>,
    /// The folder `/app`, to write; absent without a session.
    pub(crate) app: Option<OwnedFd>,
    /// Variables for agents that a user types, once a session with an agent has booted.
    pub(crate) shell_env: RefCell<BTreeMap<String, String>>,
    pub(crate) detached: Rc<Detached>,
    pub(crate) model_activity: Rc<ModelActivity>,
    /// The sync that runs beside the agent.
    pub(crate) sync: SyncProgress,
}

impl Sandbox {
    /// The folder of the checkouts.
    pub(crate) fn workspace(&self) -> String {
        self.launch.env.get(WORKSPACE_VARIABLE).cloned().unwrap_or_else(|| WORKSPACE.to_owned())
    }

    /// A user by name or number; the image's by default.
    pub(crate) fn user(&self, user: Option<&str>) -> Result<User, Fault> {
        let wanted = user.unwrap_or(&self.launch.user);
        let wanted = if wanted.is_empty() { "root" } else { wanted };
        users::find(wanted).ok_or_else(|| Fault::invalid(format!("there is no user `{wanted}`")))
    }

    /// The environment of a process of this user.
    pub(crate) fn env(&self, user: &User) -> BTreeMap<String, String> {
        let mut env = self.launch.env.clone();
        env.extend(self.session_env.borrow().clone());
        // The image's HOME belongs to the image's user.
        if user.name != self.launch.user {
            env.remove("HOME");
        }
        let mut default = |name: &str, value: &str| {
            env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        };
        default("HOME", &user.home);
        default("PATH", DEFAULT_PATH);
        default("LANG", "C.UTF-8");
        default("TERM", "xterm-256color");
        env.insert("USER".to_owned(), user.name.clone());
        env
    }

    /// The home folder of a user.
    pub(crate) fn home(&self, user: &User) -> String {
        self.env(user).remove("HOME").unwrap_or_else(|| user.home.clone())
    }

    pub(crate) fn process_spec(&self, argv: Vec<String>, user: &User, cwd: &str) -> ProcessSpec {
        let (cwd, file_bytes) = (cwd.to_owned(), self.launch.file_bytes);
        ProcessSpec {
            argv,
            env: self.env(user),
            cwd,
            uid: user.uid,
            gid: user.gid,
            file_bytes,
            cpus: self.launch.cpus.clone(),
            terminal: false,
            undumpable: false,
        }
    }

    /// How a process ended. `oom_before` is the count of OOM kills when it started.
    pub(crate) fn exit(&self, end: ProcessExit, oom_before: u64) -> Exit {
        match end {
            // A shell exits with 137 when its child was killed by SIGKILL.
            ProcessExit::Signal(9) | ProcessExit::Code(137) if self.oom.read() > oom_before => {
                Exit::Oom
            }
            ProcessExit::Code(code) => Exit::Code(code),
            ProcessExit::Signal(signal) => Exit::Signal(signal),
        }
    }
}
