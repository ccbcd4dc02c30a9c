//! Runs one check in a child process, which reports the result and exits.

use std::{fs::File, io::Read, os::fd::OwnedFd};

use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::Signal,
};

use crate::syscall::{self, Side};

/// Result of a check: what was found, or why it failed.
pub(crate) type Outcome = Result<String, String>;

/// A running check.
pub(crate) struct ChildProbe {
    output: OwnedFd,
    pidfd: OwnedFd,
}

/// Runs `act` in a child process in the namespaces `flags` name, and waits for the result.
///
/// # Safety
/// The caller must have one thread only.
pub(crate) unsafe fn in_child(flags: u64, act: impl FnOnce() -> Outcome) -> Outcome {
    // SAFETY: the caller vouches for one thread.
    unsafe { ChildProbe::start(flags, act) }?.outcome()
}

impl ChildProbe {
    /// Starts `act` in a child process in the namespaces `flags` name.
    ///
    /// # Safety
    /// The caller must have one thread only.
    pub(crate) unsafe fn start(flags: u64, act: impl FnOnce() -> Outcome) -> Result<Self, String> {
        let (output, report) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| error.to_string())?;
        // SAFETY: the caller vouches for one thread.
        let side = unsafe { syscall::clone_process(flags, None) };
        match side.map_err(|error| error.to_string())? {
            Side::Child => {
                let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                let text = match act() {
                    Ok(found) => format!("+{found}"),
                    Err(reason) => format!("-{reason}"),
                };
                let _ = rustix::io::write(&report, text.as_bytes());
                syscall::exit_now(0)
            }
            Side::Parent { pidfd, .. } => Ok(Self { output, pidfd }),
        }
    }

    /// Waits for the result.
    pub(crate) fn outcome(self) -> Outcome {
        let mut text = String::new();
        let read = File::from(self.output).read_to_string(&mut text);
        // The result is complete; the child may hang on exit.
        syscall::kill_child(&self.pidfd);
        match (read, text.split_at_checked(1)) {
            (Ok(_), Some(("+", found))) => Ok(found.to_owned()),
            (Ok(_), Some(("-", reason))) => Err(reason.to_owned()),
            _ => Err("the probing process was killed".to_owned()),
        }
    }
}
