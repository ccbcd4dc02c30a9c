//! What every part of the supervisor shares: who commands run as, with which variables, and how
//! things stand. Decides nothing itself.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use harvest_proto::{
    EventBody,
    bridge::{Boot, Exit, Fault, FaultCode, Status},
    event::{BootPhase, PhaseStatus},
    launch::Launch,
};

use crate::{
    bridge::Ownership,
    cgroup::{AgentGroup, OomCount},
    detached::Detached,
    outbox::Outbox,
    processes::{End, Order, Processes},
    turn::Turns,
    users::{self, User},
};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// Where checkouts live. An image may name another folder in this variable; ours do not.
const WORKSPACE_VARIABLE: &str = "HARVEST_WORKSPACE";
const WORKSPACE: &str = "/workspace";

/// The whole supervisor.
pub(crate) struct Supervisor {
    pub(crate) launch: Launch,
    pub(crate) processes: Rc<Processes>,
    pub(crate) outbox: Rc<Outbox>,
    pub(crate) agent_group: AgentGroup,
    pub(crate) oom: OomCount,
    pub(crate) ownership: Ownership,
    pub(crate) turns: Turns,
    pub(crate) boot: RefCell<Option<Boot>>,
    pub(crate) phase: Cell<Option<BootPhase>>,
    pub(crate) failed: Cell<bool>,
    pub(crate) detached: Rc<Detached>,
}

impl Supervisor {
    /// How things stand.
    pub(crate) fn status(&self) -> Status {
        Status {
            phase: self.phase.get(),
            failed: self.failed.get(),
            prompts: self.turns.seen(),
            last_event: self.outbox.last(),
            detached: self.detached.count(),
        }
    }

    /// Where checkouts live.
    pub(crate) fn workspace(&self) -> String {
        self.launch.env.get(WORKSPACE_VARIABLE).cloned().unwrap_or_else(|| WORKSPACE.to_owned())
    }

    /// A user by name or number; the image's when absent.
    pub(crate) fn user(&self, user: Option<&str>) -> Result<User, Fault> {
        let wanted = user.unwrap_or(&self.launch.user);
        let wanted = if wanted.is_empty() { "root" } else { wanted };
        users::find(wanted)
            .ok_or_else(|| Fault::new(FaultCode::Invalid, format!("there is no user `{wanted}`")))
    }

    /// The variables a process of this user gets.
    pub(crate) fn env(&self, user: &User) -> BTreeMap<String, String> {
        let mut env = self.launch.env.clone();
        if let Some(boot) = &*self.boot.borrow() {
            env.extend(boot.env.clone());
        }
        // The image's HOME is its own user's.
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

    /// An order for a process of this user.
    pub(crate) fn order(&self, argv: Vec<String>, user: &User, cwd: &str) -> Order {
        let (cwd, file_bytes) = (cwd.to_owned(), self.launch.file_bytes);
        Order {
            argv,
            env: self.env(user),
            cwd,
            uid: user.uid,
            gid: user.gid,
            file_bytes,
            terminal: false,
        }
    }

    /// How a process ended, given how many the memory limit had killed when it started.
    pub(crate) fn exit(&self, end: End, oom_before: u64) -> Exit {
        match end {
            // 137 is how a shell says that what it ran was killed.
            End::Signal(9) | End::Code(137) if self.oom.read() > oom_before => Exit::Oom,
            End::Code(code) => Exit::Code(code),
            End::Signal(signal) => Exit::Signal(signal),
        }
    }

    /// Tells of a boot phase.
    pub(crate) fn phase(
        &self,
        phase: BootPhase,
        status: PhaseStatus,
        millis: Option<u64>,
        tail: Option<String>,
    ) {
        self.phase.set(Some(phase));
        self.failed.set(status == PhaseStatus::Failed);
        self.outbox.push(None, EventBody::BootPhase { phase, status, millis, tail });
    }
}
