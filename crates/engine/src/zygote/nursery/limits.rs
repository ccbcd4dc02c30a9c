//! What becomes of sandboxes that live too long or write too much.

use std::{
    fs,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, Timestamp};

use super::{CLEAR_AGAIN, Live, Nursery};
use crate::{
    sandbox::Stopped,
    spec::Limits,
    zygote::watch::{Place, Watched},
};

// What has not died of a signal by then waits for a disk; the next weighing sees to it.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// What a sandbox's limits mean to the zygote.
pub(super) struct Clocks {
    /// When its life is over.
    ends_at: Option<Instant>,
    /// What it may write, where the disk does not see to that itself.
    writable: Option<Writable>,
    /// What runs in it is being killed until then.
    stopping: Option<Instant>,
}

/// How full a sandbox's disk may be, and is.
struct Writable {
    limit: u64,
    /// At least the limit. Who is over it may only become smaller, so that somebody can clean up.
    allowed: u64,
    weight: u64,
}

impl Writable {
    /// Takes note of a weight; true when what runs is to be stopped.
    fn weighed(&mut self, weight: u64) -> bool {
        let over = weight > self.allowed;
        self.weight = weight;
        self.allowed = if over { weight } else { self.limit.max(weight) };
        over
    }
}

impl Clocks {
    /// For whom nobody knows what it was asked to be.
    pub(super) const fn none() -> Self {
        Self { ends_at: None, writable: None, stopping: None }
    }

    /// `watched`: the disk has no limits of its own.
    pub(super) fn new(limits: &Limits, created_at: Timestamp, watched: bool) -> Self {
        let lived = Timestamp::from(std::time::SystemTime::now()).since(created_at);
        let left =
            limits.lifetime_secs.map(|seconds| Duration::from_secs(seconds).saturating_sub(lived));
        Self {
            // A lifetime beyond what the clock can count never ends.
            ends_at: left.and_then(|left| Instant::now().checked_add(left)),
            writable: limits.writable_bytes.filter(|_| watched).map(|limit| Writable {
                limit,
                allowed: limit,
                weight: 0,
            }),
            stopping: None,
        }
    }
}

impl Nursery {
    /// Ends whose life is over; answers when the next one's is.
    pub(super) fn end_lives(&mut self, now: Instant) -> Option<Instant> {
        let ends = |live: &Live| {
            live.clocks.ends_at.filter(|_| live.killed.is_none() && live.ended.is_none())
        };
        let over = |live: &Live| ends(live).is_some_and(|at| at <= now);
        let over: Vec<SandboxId> =
            self.live.iter().filter(|(_, live)| over(live)).map(|(id, _)| id.clone()).collect();
        for id in &over {
            self.kill_for(id, "lifetime");
        }
        self.live.values().filter_map(ends).min()
    }

    /// Keeps an eye on what they write; answers when to look again.
    pub(super) fn watch(&mut self, now: Instant) -> Option<Instant> {
        let watched: Vec<Watched<'_>> = self
            .live
            .iter()
            .filter(|(_, live)| live.ended.is_none())
            .filter_map(|(id, live)| {
                let Writable { allowed, weight, .. } = *live.clocks.writable.as_ref()?;
                Some(Watched { id, allowed, weight })
            })
            .collect();
        let place = Place { home: &self.home, cgroups: &self.cgroups, group: &self.group };
        self.watch.tick(now, &place, &watched)
    }

    /// Readable when something has been weighed.
    pub(in crate::zygote) fn scales(&self) -> Option<&fs::File> {
        self.watch.scales()
    }

    /// Stops what runs in sandboxes that have written too much; pid 1 stays, and says how it ended.
    pub(in crate::zygote) fn weighed(&mut self) {
        let now = Instant::now();
        for (id, weight) in self.watch.heard(now) {
            let Some(live) = self.live.get_mut(&id) else { continue };
            let Some(writable) = &mut live.clocks.writable else { continue };
            if !writable.weighed(weight) {
                continue;
            }
            live.clocks.stopping = Some(now + STOP_PATIENCE);
            let stopped = Stopped {
                weight_bytes: weight,
                limit_bytes: writable.limit,
                at: std::time::SystemTime::now().into(),
            };
            eprintln!(
                "{id} has written {weight} bytes of {}: what runs in it is stopped",
                writable.limit
            );
            if let Err(error) = stopped.write(&self.home, &id) {
                eprintln!("cannot write down that {id} was stopped: {error}");
            }
        }
    }

    /// Kills what runs in those that are to be stopped, until it is dead; answers when to look again.
    pub(super) fn stop(&mut self, now: Instant) -> Option<Instant> {
        let mut again = None;
        for (id, live) in &mut self.live {
            let Some(until) = live.clocks.stopping else { continue };
            let frozen = live.thaw_at.is_some() || live.freezing_until.is_some();
            if self.brake.kill_work(id, &live.pidfd, frozen) || until <= now {
                live.clocks.stopping = None;
            } else {
                again = Some(now + CLEAR_AGAIN);
            }
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_over_the_limit_may_only_become_smaller() {
        let mut disk = Writable { limit: 100, allowed: 100, weight: 0 };
        assert!(!disk.weighed(100));
        assert!(disk.weighed(150), "over");
        assert!(!disk.weighed(150), "who stays as he is, or cleans up, is left alone");
        assert!(!disk.weighed(120));
        assert!(disk.weighed(121), "who grows again is not");
        assert!(!disk.weighed(10));
        assert!(disk.weighed(101), "and below the limit the limit is what counts");
    }

    #[test]
    fn a_lifetime_is_counted_from_the_creation() {
        let limits = Limits { lifetime_secs: Some(60), ..Limits::default() };
        let long_ago = Clocks::new(&limits, Timestamp::from_millis(0), true);
        assert!(long_ago.ends_at.unwrap() <= Instant::now());
        let now = Clocks::new(&limits, std::time::SystemTime::now().into(), true);
        assert!(now.ends_at.unwrap() > Instant::now());
        let endless = Limits { lifetime_secs: Some(u64::MAX), ..limits };
        assert!(Clocks::new(&endless, Timestamp::from_millis(0), true).ends_at.is_none());
    }
}
