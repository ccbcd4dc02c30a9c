//! Runs the engine for an unprivileged user. Every engine process is root of a user namespace in
//! which 0 is the user and 1 to 65,535 are ids from `/etc/subuid` and `/etc/subgid`; otherwise it
//! behaves as root, as far as the kernel allows.
//!
//! Each command creates its own such namespace. All have the same map, so files, sockets and
//! descriptors mean the same in each, and a kill -9 leaves nothing behind. The restrictions
//! compared with root are described in `docs/decisions/0012-rootless.md`.

mod maps;
mod store_owner;

use std::{
    borrow::Cow,
    fs,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    process::{Command, Stdio},
    sync::OnceLock,
};

use harvest_proto::Hint;
use rustix::{
    mount::{MountPropagationFlags, mount_change},
    pipe::{PipeFlags, pipe_with},
    thread::UnshareFlags,
};

use crate::syscall::{self, Side};
pub(crate) use maps::identity_map;
pub(crate) use store_owner::check_store_owner;

/// Why an unprivileged user cannot run sandboxes here.
#[derive(Debug, thiserror::Error)]
pub enum RootlessError {
    /// Called after another thread was started.
    #[error("a user namespace can only be entered before the first thread starts")]
    Threads,
    /// [`enter`] was not called or failed.
    #[error("without root, sandboxes need a user namespace: {reason}")]
    NotEntered {
        /// Why there is no user namespace.
        reason: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// The user has no subordinate ids for a sandbox's users.
    #[error("user `{user}` has no range of 65,535 ids in {file}")]
    NoIds {
        /// The user's name or uid.
        user: String,
        /// The file that was searched.
        file: &'static str,
    },
    /// The kernel or its configuration refuses user namespaces.
    #[error("the kernel refuses to {doing}")]
    Refused {
        /// The refused action.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// `newuidmap` or `newgidmap` failed.
    #[error("cannot map ids: {output}")]
    Map {
        /// Its error output.
        output: String,
    },
}

impl Hint for RootlessError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        Some(self.fix().into())
    }
}

impl RootlessError {
    fn fix(&self) -> &'static str {
        match self {
            Self::Threads => "run as root, or through the `harvest` binary",
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

/// Moves this process into a new user and mount namespace in which it is root, unless it is root
/// already. Must be called before the first thread starts; child processes inherit it.
///
/// # Errors
/// When the host refuses user namespaces, or has no ids for this user.
pub fn enter() -> Result<(), RootlessError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let entered = try_enter();
    if let Err(error) = &entered {
        let cause =
            std::error::Error::source(error).map_or(String::new(), |cause| format!(": {cause}"));
        let _first_failure_is_kept = REFUSAL.set((format!("{error}{cause}"), error.fix()));
    }
    entered
}

/// Why [`enter`] failed; needed later by [`require_root`].
static REFUSAL: OnceLock<(String, &'static str)> = OnceLock::new();

fn try_enter() -> Result<(), RootlessError> {
    if fs::read_dir("/proc/self/task").map_or(0, Iterator::count) != 1 {
        return Err(RootlessError::Threads);
    }
    let maps = maps::of_this_user()?;
    let (mut mapped, go) = Mapper::start(maps)?;
    // SAFETY: this is the only thread, and it holds nothing that depends on the namespaces it
    // leaves.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) }
        .map_err(|error| refused("create a user namespace", error))?;
    drop(go);
    mapped.finish()?;
    // Some kernels create the namespace without capabilities in it; the mount shows that.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
        .map_err(|error| refused("mount in a user namespace", error))?;
    limit_inotify();
    Ok(())
}

/// Number of sandboxes among which a user's kernel limits are divided.
pub(crate) const SANDBOXES_PER_USER: u64 = 4;

/// Limits each sandbox to a part of the user's inotify instances and watches. The kernel charges
/// them to the owner of the sandbox's user namespace and limits each owner to this namespace's
/// value.
fn limit_inotify() {
    for name in ["instances", "watches"] {
        let limit = fs::read_to_string(format!("/proc/sys/fs/inotify/max_user_{name}"));
        let limit = limit.ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(limit) = limit {
            // Best effort: a refusal leaves the limits unchanged.
            let _ = fs::write(
                format!("/proc/sys/user/max_inotify_{name}"),
                (limit / SANDBOXES_PER_USER).to_string(),
            );
        }
    }
}

/// Returns an error unless this process is root, of the host or of a user namespace.
pub(crate) fn require_root() -> Result<(), RootlessError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let refusal = REFUSAL.get().cloned();
    let (reason, hint) =
        refusal.unwrap_or_else(|| ("none was created".to_owned(), RootlessError::Threads.fix()));
    Err(RootlessError::NotEntered { reason, hint })
}

fn refused(doing: &'static str, error: impl Into<io::Error>) -> RootlessError {
    RootlessError::Refused { doing, source: error.into() }
}

/// Whether this process is root of a user namespace only, through [`enter`] or its parent: then the
/// kernel refuses operations that need the host's root.
#[must_use]
pub fn is_active() -> bool {
    static ACTIVE: OnceLock<bool> = OnceLock::new();
    *ACTIVE.get_or_init(|| {
        fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !maps::is_initial(&map))
    })
}

/// The child process outside the namespace, because ids can be mapped only from there.
struct Mapper {
    pidfd: OwnedFd,
    output: fs::File,
}

impl Mapper {
    /// Also returns the pipe end to close once the namespace exists.
    fn start(maps: maps::Maps) -> Result<(Self, OwnedFd), RootlessError> {
        let pipe =
            || pipe_with(PipeFlags::CLOEXEC).map_err(|error| refused("create a pipe", error));
        let ((waits, go), (output, say)) = (pipe()?, pipe()?);
        let target = std::process::id();
        // SAFETY: `enter` has checked that there is one thread.
        match unsafe { syscall::clone_process(0, None) }.map_err(|error| refused("fork", error))? {
            Side::Parent { pidfd, .. } => Ok((Self { pidfd, output: output.into() }, go)),
            Side::Child => {
                drop((go, output));
                let _end_of_file_when_the_namespace_exists = fs::File::from(waits).read(&mut [0]);
                let failed = maps.apply(target).err().unwrap_or_default();
                let _ = fs::File::from(say).write_all(failed.as_bytes());
                syscall::exit_now(0)
            }
        }
    }

    fn finish(&mut self) -> Result<(), RootlessError> {
        let mut output = String::new();
        let _ = self.output.read_to_string(&mut output);
        syscall::reap_child(&self.pidfd);
        match output.trim() {
            "" => Ok(()),
            output => Err(RootlessError::Map { output: output.to_owned() }),
        }
    }
}

/// Runs a setuid program; returns its error output when it fails.
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
