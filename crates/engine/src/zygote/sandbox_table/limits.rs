//! Enforces the lifetime and the disk limit of sandboxes.

use std::{
    fs,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, Timestamp};

use super::{CLEAR_POLL, LiveSandbox, SandboxTable};
use crate::{sandbox_record::DiskLimitStop, spec::Limits, zygote::disk_watch::WatchedSandbox};

// A process that cannot be frozen for this long waits for a disk; the next scan handles it. Pid 1
// retries starts for longer than this.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The limits of one sandbox that the zygote enforces.
pub(super) struct LimitState {
    /// End of its lifetime.
    ends_at: Option<Instant>,
    /// Its disk limit, where the file system has no quota.
    writable: Option<WritableUsage>,
    /// Its processes are being killed until this deadline.
    killing_until: Option<Instant>,
}

/// Disk usage of a sandbox and its limit.
struct WritableUsage {
    limit: u64,
    /// At least the limit. A sandbox over its limit may only shrink, so that it can clean up.
    allowed: u64,
    used: u64,
}

impl WritableUsage {
    /// Records a measurement; true when the sandbox's processes are to be killed.
    fn record(&mut self, used: u64) -> bool {
        let over = used > self.allowed;
        self.used = used;
        self.allowed = if over { used } else { self.limit.max(used) };
        over
    }
}

impl LimitState {
    /// For a sandbox without a readable record.
    pub(super) const fn none() -> Self {
        Self { ends_at: None, writable: None, killing_until: None }
    }

    /// `watched`: the file system has no quotas.
    pub(super) fn new(limits: &Limits, created_at: Timestamp, watched: bool) -> Self {
        let lived = Timestamp::from(std::time::SystemTime::now()).since(created_at);
        let left =
            limits.lifetime_secs.map(|seconds| Duration::from_secs(seconds).saturating_sub(lived));
        Self {
            // A lifetime that the clock cannot represent never ends.
            ends_at: left.and_then(|left| Instant::now().checked_add(left)),
            writable: limits.writable_bytes.filter(|_| watched).map(|limit| WritableUsage {
                limit,
                allowed: limit,
                used: 0,
            }),
            killing_until: None,
        }
    }
}

impl SandboxTable {
    /// Kills sandboxes whose lifetime is over; returns when the next one ends.
    pub(super) fn kill_expired(&mut self, now: Instant) -> Option<Instant> {
        let ends = |live: &LiveSandbox| {
            live.limit_state.ends_at.filter(|_| live.killed.is_none() && live.ended.is_none())
        };
        let over = |live: &LiveSandbox| ends(live).is_some_and(|at| at <= now);
        let over: Vec<SandboxId> =
            self.live.iter().filter(|(_, live)| over(live)).map(|(id, _)| id.clone()).collect();
        for id in &over {
            self.kill_for(id, "lifetime");
        }
        self.live.values().filter_map(ends).min()
    }

    /// Checks disk usage; returns when to check again.
    pub(super) fn scan_disks(&mut self, now: Instant) -> Option<Instant> {
        let watched: Vec<WatchedSandbox<'_>> = self
            .live
            .iter()
            .filter(|(_, live)| live.ended.is_none())
            .filter_map(|(id, live)| {
                let WritableUsage { allowed, used, .. } = *live.limit_state.writable.as_ref()?;
                Some(WatchedSandbox { id, cgroup: &live.cgroup, allowed, used })
            })
            .collect();
        self.disk_watch.tick(now, &self.cgroups, &watched)
    }

    /// Readable when a disk usage scan has results.
    pub(in crate::zygote) fn scan_output(&self) -> Option<&fs::File> {
        self.disk_watch.scan_output()
    }

    /// Kills the processes of sandboxes over their disk limit; pid 1 stays and reports how they
    /// ended.
    pub(in crate::zygote) fn enforce_disk_limits(&mut self) {
        let now = Instant::now();
        for (id, used) in self.disk_watch.read_results(now) {
            let Some(live) = self.live.get_mut(&id) else { continue };
            let Some(writable) = &mut live.limit_state.writable else { continue };
            if !writable.record(used) {
                continue;
            }
            live.limit_state.killing_until = Some(now + KILL_TIMEOUT);
            let (limit, at) = (writable.limit, std::time::SystemTime::now().into());
            let stop = DiskLimitStop { used_bytes: used, limit_bytes: limit, at };
            eprintln!("{id} uses {used} of {limit} bytes on disk: killing its processes");
            if let Err(error) = stop.write(&self.home, &id) {
                eprintln!("cannot record the disk limit stop of {id}: {error}");
            }
        }
    }

    /// Kills processes of sandboxes over their limit until they are dead; returns when to check
    /// again.
    pub(super) fn kill_over_limit(&mut self, now: Instant) -> Option<Instant> {
        let mut check_at = None;
        for (id, live) in &mut self.live {
            let Some(until) = live.limit_state.killing_until else { continue };
            let frozen = live.thaw_at.is_some() || live.freezing_until.is_some();
            if self.cgroups.kill_work(id, &live.cgroup, &live.pidfd, frozen) {
                live.limit_state.killing_until = None;
            } else if until <= now {
                live.limit_state.killing_until = None;
                if !frozen {
                    let _ = self.cgroups.freeze(id, &live.cgroup, &live.pidfd, false);
                }
            } else {
                check_at = Some(now + CLEAR_POLL);
            }
        }
        check_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_over_its_limit_may_only_shrink() {
        let mut disk = WritableUsage { limit: 100, allowed: 100, used: 0 };
        assert!(!disk.record(100));
        assert!(disk.record(150), "over");
        assert!(!disk.record(150), "an unchanged or shrinking disk is left alone");
        assert!(!disk.record(120));
        assert!(disk.record(121), "a growing one is not");
        assert!(!disk.record(10));
        assert!(disk.record(101), "below the limit only the limit counts");
    }

    #[test]
    fn lifetime_is_counted_from_creation() {
        let limits = Limits { lifetime_secs: Some(60), ..Limits::default() };
        let long_ago = LimitState::new(&limits, Timestamp::from_millis(0), true);
        assert!(long_ago.ends_at.unwrap() <= Instant::now());
        let now = LimitState::new(&limits, std::time::SystemTime::now().into(), true);
        assert!(now.ends_at.unwrap() > Instant::now());
        let endless = Limits { lifetime_secs: Some(u64::MAX), ..limits };
        assert!(LimitState::new(&endless, Timestamp::from_millis(0), true).ends_at.is_none());
    }
}
