//! One trial: something is done in a new process, which says how it went and ends.

use std::{
    fs::File,
    io::Read,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid},
};

use crate::syscall::{self, Side};

/// What a trial brought: what was found, or why it failed.
pub(crate) type Outcome = Result<String, String>;

/// A trial under way.
pub(crate) struct Trial {
    hear: OwnedFd,
    pidfd: OwnedFd,
}

/// Does something in a new process, born in the namespaces `flags` name, and waits for what comes of it.
///
/// # Safety
/// The caller must have one thread only.
pub(crate) unsafe fn in_child(flags: u64, act: impl FnOnce() -> Outcome) -> Outcome {
    // SAFETY: the caller vouches for one thread.
    unsafe { Trial::start(flags, act) }?.outcome()
}

impl Trial {
    /// Starts doing something in a new process, born in the namespaces `flags` name.
    ///
    /// # Safety
    /// The caller must have one thread only.
    pub(crate) unsafe fn start(flags: u64, act: impl FnOnce() -> Outcome) -> Result<Self, String> {
        let (hear, say) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| error.to_string())?;
        // SAFETY: the caller vouches for one thread.
        let side = unsafe { syscall::clone_process(flags, None) };
        match side.map_err(|error| error.to_string())? {
            Side::Child => {
                let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                let text = match act() {
                    Ok(found) => format!("+{found}"),
                    Err(reason) => format!("-{reason}"),
                };
                let _ = rustix::io::write(&say, text.as_bytes());
                syscall::exit_now(0)
            }
            Side::Parent { pidfd, .. } => Ok(Self { hear, pidfd }),
        }
    }

    /// Waits for what comes of it.
    pub(crate) fn outcome(self) -> Outcome {
        let mut text = String::new();
        let heard = File::from(self.hear).read_to_string(&mut text);
        // It has said all it will; what it may be stuck in does not matter.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        match (heard, text.split_at_checked(1)) {
            (Ok(_), Some(("+", found))) => Ok(found.to_owned()),
            (Ok(_), Some(("-", reason))) => Err(reason.to_owned()),
            _ => Err("the process that tried it was killed".to_owned()),
        }
    }
}
