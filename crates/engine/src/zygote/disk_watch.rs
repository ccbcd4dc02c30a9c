//! Enforces disk limits where the file system has no quotas. The zygote must never wait for a disk,
//! so a child process with the lowest CPU priority measures the sandboxes' trees.
//!
//! A cheap check decides when to scan: no sandbox can have grown by more than the host's disk has
//! lost. A sandbox that grows while another shrinks is found by the scan every minute.

use std::{
    fs,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;
use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal},
};

use super::freezer::HomeCgroups;
use crate::{
    disk_usage::scan::{NAME_BYTES, scan_tree, scan_unlinked_files},
    home::Home,
    syscall::{self, Side},
};

const CHECK_EVERY: Duration = Duration::from_millis(500);
const SCAN_EVERY: Duration = Duration::from_secs(60);
// Limits scanning to a tenth of one CPU, and only while the CPU is otherwise idle.
const REST_PER_WORK: u32 = 10;
// Loss of free space that always triggers a scan, and the least that ever does.
const MAX_LOSS_BYTES: u64 = 1 << 30;
const MIN_LOSS_BYTES: u64 = 1 << 20;
// How many names beyond its limit a tree is still walked.
const EXTRA_NAMES: u64 = 1 << 20;

/// A sandbox with a disk limit.
pub(super) struct WatchedSandbox<'a> {
    pub(super) id: &'a SandboxId,
    /// Name of its cgroups.
    pub(super) cgroup: &'a str,
    /// Usage above this exceeds the limit.
    pub(super) allowed: u64,
    /// Usage found by the last scan.
    pub(super) used: u64,
}

pub(super) struct DiskWatch {
    scan: Option<UsageScan>,
    check_at: Option<Instant>,
    /// Most free space seen since the last scan began.
    free: Option<Free>,
    rest_until: Instant,
    scanned_at: Option<Instant>,
}

/// A running child process that measures disk usage.
struct UsageScan {
    pidfd: OwnedFd,
    output: fs::File,
    received: Vec<u8>,
    began: Instant,
}

/// Free space of the host's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Free {
    bytes: u64,
    names: u64,
}

impl DiskWatch {
    pub(super) fn new() -> Self {
        let rest_until = Instant::now();
        Self { scan: None, check_at: None, free: None, rest_until, scanned_at: None }
    }

    /// Readable when the scan has written results.
    pub(super) fn scan_output(&self) -> Option<&fs::File> {
        self.scan.as_ref().map(|scan| &scan.output)
    }

    /// Checks free space when due and starts a scan when needed; returns when to check again.
    pub(super) fn tick(
        &mut self,
        now: Instant,
        scope: &HomeCgroups,
        watched: &[WatchedSandbox<'_>],
    ) -> Option<Instant> {
        if watched.is_empty() {
            self.check_at = None;
            self.free = None;
            self.scanned_at = None;
            return None;
        }
        let at = *self.check_at.get_or_insert(now + CHECK_EVERY);
        if now < at {
            return Some(at);
        }
        self.check_at = Some(now + CHECK_EVERY);
        let free = free(&scope.home);
        let most = self.free.get_or_insert(free);
        *most = Free { bytes: most.bytes.max(free.bytes), names: most.names.max(free.names) };
        let due = self.scanned_at.is_none_or(|scanned| now.duration_since(scanned) > SCAN_EVERY);
        if self.scan.is_none()
            && now >= self.rest_until
            && (due || may_exceed(*most, free, watched))
        {
            self.free = Some(free);
            self.scanned_at = Some(now);
            match UsageScan::start(now, scope, watched) {
                Ok(scan) => self.scan = Some(scan),
                Err(error) => eprintln!("cannot measure disk usage of sandboxes: {error}"),
            }
        }
        self.check_at
    }

    /// Reads what the scan has written; returns the results once it has finished.
    pub(super) fn read_results(&mut self, now: Instant) -> Vec<(SandboxId, u64)> {
        let Some(scan) = &mut self.scan else { return Vec::new() };
        let mut bytes = [0; 4096];
        use io::ErrorKind::{Interrupted, WouldBlock};
        match scan.output.read(&mut bytes) {
            Ok(length @ 1..) => {
                scan.received.extend_from_slice(&bytes[..length]);
                return Vec::new();
            }
            Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => return Vec::new(),
            _ => {}
        }
        let Some(scan) = self.scan.take() else { return Vec::new() };
        self.rest_until = now + now.duration_since(scan.began) * REST_PER_WORK;
        let text = String::from_utf8_lossy(&scan.received);
        text.lines().filter_map(parse_line).collect()
    }

    /// Kills a running scan.
    pub(super) fn stop(&mut self) {
        self.scan = None;
    }
}

impl UsageScan {
    fn start(
        now: Instant,
        scope: &HomeCgroups,
        watched: &[WatchedSandbox<'_>],
    ) -> io::Result<Self> {
        let (output, results) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // Before the fork: pids of this namespace mean nothing in the child's.
        let processes: Vec<Vec<Pid>> = watched
            .iter()
            .map(|sandbox| scope.hierarchy.work_processes(&scope.group, sandbox.cgroup))
            .collect();
        // In its own pid namespace the child can signal no other process.
        let flags = libc::CLONE_NEWPID.cast_unsigned().into();
        // SAFETY: the zygote has one thread.
        match unsafe { syscall::clone_process(flags, None) }? {
            Side::Child => {
                let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                // SAFETY: the child never returns to the code that owns the other descriptors.
                unsafe { syscall::close_all_but(&[results.as_fd()]) };
                measure(&results, &scope.home, watched.iter().zip(&processes));
                syscall::exit_now(0)
            }
            Side::Parent { pidfd, .. } => {
                Ok(Self { pidfd, output: output.into(), received: Vec::new(), began: now })
            }
        }
    }
}

impl Drop for UsageScan {
    fn drop(&mut self) {
        syscall::kill_child(&self.pidfd);
    }
}

/// Measures each sandbox and prints one line `ID BYTES` for it.
fn measure<'a>(
    results: &OwnedFd,
    home: &Home,
    watched: impl Iterator<Item = (&'a WatchedSandbox<'a>, &'a Vec<Pid>)>,
) {
    let _ = rustix::process::nice(19);
    syscall::idle_disk_priority();
    let Ok(results) = results.try_clone() else { return };
    let flags = rustix::fs::fcntl_getfl(&results).unwrap_or(rustix::fs::OFlags::empty());
    let _ = rustix::fs::fcntl_setfl(&results, flags - rustix::fs::OFlags::NONBLOCK);
    let mut results = fs::File::from(results);
    for (sandbox, processes) in watched {
        let most_names = sandbox.allowed / NAME_BYTES + EXTRA_NAMES;
        let upper = home.writable(sandbox.id).join("upper");
        let used = scan_tree(&upper, most_names)
            .saturating_add(unlinked_bytes(upper, processes, most_names));
        if writeln!(results, "{} {used}", sandbox.id).is_err() {
            return;
        }
    }
}

fn unlinked_bytes(upper: PathBuf, processes: &[Pid], most: u64) -> u64 {
    // An overlay reports its own device for its files, or the upper layer's where layers are on
    // several.
    let inside = processes.first().map(|pid| format!("/proc/{}/root", pid.as_raw_nonzero()).into());
    let places = [Some(upper), inside];
    let device = |path: PathBuf| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
    let devices: Vec<u64> = places.into_iter().flatten().filter_map(device).collect();
    scan_unlinked_files(processes, &devices, most)
}

fn parse_line(line: &str) -> Option<(SandboxId, u64)> {
    let (id, used) = line.split_once(' ')?;
    Some((id.parse().ok()?, used.parse().ok()?))
}

fn free(home: &Home) -> Free {
    // A disk that does not answer is checked again by the timer.
    rustix::fs::statvfs(home.path()).map_or(Free { bytes: 0, names: 0 }, |about| Free {
        bytes: about.f_bfree.saturating_mul(about.f_frsize),
        names: about.f_ffree,
    })
}

/// Whether the disk has lost so much space that some sandbox may be half-way from its last usage to
/// its limit.
fn may_exceed(most: Free, free: Free, watched: &[WatchedSandbox<'_>]) -> bool {
    let room = watched.iter().map(|sandbox| sandbox.allowed.saturating_sub(sandbox.used)).min();
    let loss = (room.unwrap_or(u64::MAX) / 2).clamp(MIN_LOSS_BYTES, MAX_LOSS_BYTES);
    most.bytes.saturating_sub(free.bytes) >= loss
        || most.names.saturating_sub(free.names) >= loss / NAME_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_starts_only_when_lost_space_could_matter() {
        let (near, far) = (SandboxId::random(), SandboxId::random());
        let far = WatchedSandbox { id: &far, cgroup: "", allowed: 10 << 30, used: 0 };
        let near = WatchedSandbox {
            id: &near,
            cgroup: "",
            allowed: 10 << 30,
            used: (10 << 30) - (8 << 20),
        };
        let most = Free { bytes: 1 << 40, names: 1 << 20 };
        let after =
            |bytes: u64, names: u64| Free { bytes: most.bytes - bytes, names: most.names - names };
        assert!(!may_exceed(most, after(5 << 20, 10), &[WatchedSandbox { ..far }]));
        assert!(may_exceed(
            most,
            after(5 << 20, 10),
            &[WatchedSandbox { ..far }, WatchedSandbox { ..near }]
        ));
        assert!(may_exceed(most, after(1 << 30, 0), &[WatchedSandbox { ..far }]));
        assert!(may_exceed(most, after(0, 1 << 18), &[far]), "inodes count too");
    }

    #[test]
    fn scan_line_is_an_id_and_a_size() {
        let id = SandboxId::random();
        assert_eq!(parse_line(&format!("{id} 17")), Some((id, 17)));
        assert_eq!(parse_line("nonsense"), None);
        assert_eq!(parse_line("sbx_ -1"), None);
    }
}
