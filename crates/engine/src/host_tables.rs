//! The kernel's tables that all sandboxes and the host share: open files and pids. No cgroup limits
//! the first, so limits per process keep all sandboxes together below half of each.

use std::fs;

const FILE_MAX: &str = "/proc/sys/fs/file-max";
const NR_OPEN: &str = "/proc/sys/fs/nr_open";
const PID_MAX: &str = "/proc/sys/kernel/pid_max";
const THREADS_MAX: &str = "/proc/sys/kernel/threads-max";

// Pid 1 of a sandbox needs them for the connections of its door.
const MIN_FILES: u64 = 8192;
// systemd's limit for services; databases ask for less.
const MAX_FILES: u64 = 524_288;
// Enough for any build; fewer only on hosts with small tables.
const MAX_PROCESSES: u32 = 4096;
const MIN_PROCESSES: u32 = 256;
// All processes of this many sandboxes fit, each with all files it may open.
const SANDBOXES: u64 = 64;

/// Sizes of the host's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostTables {
    pub(crate) files: u64,
    pub(crate) files_per_process: u64,
    pub(crate) pids: u64,
}

impl HostTables {
    pub(crate) fn read() -> Self {
        let number = |path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let pids = number(PID_MAX).unwrap_or(u64::MAX).min(number(THREADS_MAX).unwrap_or(u64::MAX));
        Self {
            files: number(FILE_MAX).unwrap_or(u64::MAX),
            files_per_process: number(NR_OPEN).unwrap_or(MAX_FILES),
            pids,
        }
    }

    /// Whether sandboxes cannot fill the table of open files.
    pub(crate) fn has_enough_files(self) -> bool {
        self.files / 2 >= SANDBOXES * u64::from(MAX_PROCESSES) * MIN_FILES
    }

    /// How many files each process of a sandbox may open.
    pub(crate) fn open_files(self) -> u64 {
        let fair = self.files / 2 / SANDBOXES / u64::from(MAX_PROCESSES);
        fair.clamp(MIN_FILES, MAX_FILES).min(self.files_per_process)
    }

    fn processes(self, sandboxes: u64) -> u32 {
        let fair = u32::try_from(self.pids / 2 / sandboxes.max(1)).unwrap_or(u32::MAX);
        fair.clamp(MIN_PROCESSES, MAX_PROCESSES)
    }
}

/// The process limit with which this many sandboxes use at most half of the host's pids.
#[must_use]
pub fn processes_per_sandbox(sandboxes: usize) -> u32 {
    HostTables::read().processes(u64::try_from(sandboxes).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tables(files: u64, pids: u64) -> HostTables {
        HostTables { files, files_per_process: 1 << 20, pids }
    }

    #[test]
    fn small_hosts_get_fewer_processes_and_files() {
        let small = tables(2_465_780, 32_768);
        assert_eq!((small.processes(8), small.open_files()), (2048, MIN_FILES));
        // What systemd sets at boot.
        let large = tables(i64::MAX as u64, 4_194_304);
        assert_eq!((large.processes(8), large.open_files()), (MAX_PROCESSES, MAX_FILES));
        assert_eq!((small.has_enough_files(), large.has_enough_files()), (false, true));
    }

    proptest! {
        #[test]
        fn all_sandboxes_stay_below_half_of_the_tables(
            files in 1u64 << 32..u64::MAX, pids in 32_768u64..4_194_304, sandboxes in 1u64..64,
        ) {
            let tables = tables(files, pids);
            let processes = u64::from(tables.processes(sandboxes));
            prop_assert!(sandboxes * processes <= pids / 2);
            prop_assert!(sandboxes * processes * tables.open_files() <= files / 2);
        }
    }
}
