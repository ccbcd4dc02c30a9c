//! The engine for a user who is not root. Every process of the engine runs as root of a user namespace
//! in which 0 is the user and 1 to 65,535 are ids that `/etc/subuid` and `/etc/subgid` give them; all
//! else goes on as if it were root, as far as the kernel lets it.
//!
//! Each command makes such a namespace of its own. They all have the same map, so files, sockets and
//! descriptors mean the same in each of them, and there is nothing that a kill -9 could leave behind.
//! What is weaker than with root is in `docs/decisions/0012-rootless.md`.

mod maps;
mod stamp;

use std::{
    fs,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    process::{Command, Stdio},
    sync::OnceLock,
};

use rustix::{
    mount::{MountPropagationFlags, mount_change},
    pipe::{PipeFlags, pipe_with},
    process::{WaitId, WaitIdOptions, waitid},
    thread::UnshareFlags,
};

use crate::{
    plan::Ids,
    syscall::{self, Side},
};
pub(crate) use maps::same_ids;
pub(crate) use stamp::check_store;

/// Why a user who is not root cannot have sandboxes here.
#[derive(Debug, thiserror::Error)]
pub enum RootlessError {
    /// It was asked for too late.
    #[error("a user namespace can only be entered before the first thread starts")]
    Threads,
    /// Nobody has called [`enter`], or it failed.
    #[error("an ordinary user needs a user namespace to run sandboxes: {reason}")]
    NotEntered {
        /// Why there is none.
        reason: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// The user has no ids to give to a sandbox's users.
    #[error("{file} gives the user `{user}` no range of 65,535 ids")]
    NoIds {
        /// Their name, or their number.
        user: String,
        /// Where a range was looked for.
        file: &'static str,
    },
    /// The kernel or its configuration forbids it.
    #[error("the kernel refuses to {doing}")]
    Refused {
        /// What was being done.
        doing: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// The program that maps ids failed.
    #[error("the ids cannot be mapped: {said}")]
    Map {
        /// Its own words.
        said: String,
    },
}

impl RootlessError {
    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Threads => "start it as root, or through the harvest binary",
            Self::NotEntered { hint, .. } => hint,
            Self::NoIds { .. } => {
                "as root: `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`"
            }
            Self::Refused { .. } => {
                "allow unprivileged user namespaces (sysctl user.max_user_namespaces, \
                 kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), or run as root"
            }
            Self::Map { .. } => "install newuidmap and newgidmap: `apt-get install uidmap`",
        }
    }
}

/// Makes this process root of a user namespace of its own, with a mount namespace to go with it, unless
/// it is root already. To be called before the first thread starts; what is started later inherits it.
///
/// # Errors
/// When the host does not let its users have such namespaces, or has no ids for this one.
pub fn enter() -> Result<(), RootlessError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let entered = try_enter();
    if let Err(error) = &entered {
        let cause =
            std::error::Error::source(error).map_or(String::new(), |cause| format!(": {cause}"));
        let _is_kept_once = REFUSAL.set((format!("{error}{cause}"), error.hint()));
    }
    entered
}

/// Why the last [`enter`] failed: whoever needs it asks much later.
static REFUSAL: OnceLock<(String, &'static str)> = OnceLock::new();

fn try_enter() -> Result<(), RootlessError> {
    if fs::read_dir("/proc/self/task").map_or(0, Iterator::count) != 1 {
        return Err(RootlessError::Threads);
    }
    let maps = maps::of_this_user()?;
    let (mut mapped, go) = Mapper::start(maps)?;
    // SAFETY: this is the only thread; it has nothing that depends on the namespaces it leaves.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) }
        .map_err(|error| refused("make a user namespace", error))?;
    drop(go);
    mapped.finish()?;
    // Some kernels give a namespace without any power over it; then this is where it shows.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
        .map_err(|error| refused("mount in a user namespace", error))?;
    divide();
    Ok(())
}

/// How many sandboxes it takes to use up what the kernel gives a user.
pub(crate) const SHARE: u64 = 4;

/// Leaves each sandbox a part of the user's inotify instances and watches only. The kernel counts them
/// for the owner of the sandbox's user namespace, and limits each owner to what this namespace says.
fn divide() {
    for name in ["instances", "watches"] {
        let limit = fs::read_to_string(format!("/proc/sys/fs/inotify/max_user_{name}"));
        let limit = limit.ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(limit) = limit {
            // A kernel that does not let us leaves everything as it was.
            let _ = fs::write(
                format!("/proc/sys/user/max_inotify_{name}"),
                (limit / SHARE).to_string(),
            );
        }
    }
}

/// Refuses what only works as root, of the host or of a user namespace.
pub(crate) fn check() -> Result<(), RootlessError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let refusal = REFUSAL.get().cloned();
    let (reason, hint) =
        refusal.unwrap_or_else(|| ("none was made".to_owned(), RootlessError::Threads.hint()));
    Err(RootlessError::NotEntered { reason, hint })
}

fn refused(doing: &'static str, error: impl Into<io::Error>) -> RootlessError {
    RootlessError::Refused { doing, source: error.into() }
}

/// Whether this process is root of some user namespace only, by [`enter`] or because somebody else put
/// it there: then the kernel refuses what only the host's root may do.
#[must_use]
pub fn is_here() -> bool {
    static HERE: OnceLock<bool> = OnceLock::new();
    *HERE.get_or_init(|| {
        fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !maps::is_initial(&map))
    })
}

impl Ids {
    /// What this process can give.
    pub(crate) fn here() -> Self {
        if is_here() { Self::Shared } else { Self::Own }
    }
}

/// The process that stays outside for a moment, because only from there ids can be mapped.
struct Mapper {
    pidfd: OwnedFd,
    said: fs::File,
}

impl Mapper {
    /// Answers also what to drop when the namespace is there.
    fn start(maps: maps::Maps) -> Result<(Self, OwnedFd), RootlessError> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(|error| refused("make a pipe", error));
        let ((waits, go), (said, say)) = (pipe()?, pipe()?);
        let target = std::process::id();
        // SAFETY: `enter` has made sure that there is one thread.
        match unsafe { syscall::clone_process(0, None) }.map_err(|error| refused("fork", error))? {
            Side::Parent { pidfd, .. } => Ok((Self { pidfd, said: said.into() }, go)),
            Side::Child => {
                drop((go, said));
                let _ends_when_the_other_side_is_ready = fs::File::from(waits).read(&mut [0]);
                let failed = maps.apply(target).err().unwrap_or_default();
                let _ = fs::File::from(say).write_all(failed.as_bytes());
                syscall::exit_now(0)
            }
        }
    }

    fn finish(&mut self) -> Result<(), RootlessError> {
        let mut said = String::new();
        let _ = self.said.read_to_string(&mut said);
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        match said.trim() {
            "" => Ok(()),
            said => Err(RootlessError::Map { said: said.to_owned() }),
        }
    }
}

/// Runs a program that is allowed more than we are; its words when it fails.
fn run(program: &str, arguments: &[String]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}
