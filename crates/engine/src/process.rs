//! Processes of the host: how to recognise one again, and programs that must not outlive this one.

use std::{fs, os::unix::process::CommandExt, process::Command, sync::OnceLock};

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

/// The id of the current boot. Processes recorded during another boot no longer exist.
pub(crate) fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    })
}

/// The start time of a process in ticks since boot; together with the pid it identifies the
/// process. `None` when the process does not exist or is a zombie.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may contain any text; the fields follow the last `)`.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether a process is exiting but not dead yet.
pub(crate) fn is_exiting(pid: u32) -> bool {
    // From <linux/sched.h>.
    const PF_EXITING: u64 = 4;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rfind(')').map_or("", |end| &stat[end + 1..]);
    let flags = fields.split_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_ticks_exist_only_for_live_processes() {
        let own = start_ticks(std::process::id()).unwrap();
        assert!(own > 0);
        assert_eq!(start_ticks(u32::MAX), None);
    }

    #[test]
    fn zombies_are_exiting_and_live_processes_are_not() {
        assert!(!is_exiting(std::process::id()) && !is_exiting(u32::MAX));
        let mut child = Command::new("true").spawn().unwrap();
        while start_ticks(child.id()).is_some() {
            std::thread::yield_now();
        }
        assert!(is_exiting(child.id()));
        child.wait().unwrap();
    }
}
