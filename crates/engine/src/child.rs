//! Programs of the host that must not outlive this process.

use std::{os::unix::process::CommandExt, process::Command};

/// Makes the kernel kill a command when the thread that spawns it ends, however it ends.
pub fn kill_with_parent(command: &mut Command) {
    // SAFETY: between fork and exec only one system call is made, on plain integers.
    unsafe {
        command.pre_exec(|| {
            let signal = Some(rustix::process::Signal::KILL);
            rustix::process::set_parent_process_death_signal(signal).map_err(Into::into)
        });
    }
}
