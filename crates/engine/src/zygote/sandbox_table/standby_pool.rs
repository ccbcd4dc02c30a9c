//! The pool of standby processes: preforked while the zygote is idle, used once each, as many as
//! starts recently came in one burst.

use std::{
    fs, io,
    time::{Duration, Instant},
};

use rustix::process::{Resource, getrlimit};

use super::SandboxTable;
use crate::{
    error::StepError,
    facts,
    plan::{IdAllocation, Plan},
    sandbox_record::Record,
    spec::Network,
    zygote::{protocol::StandbyCounts, standby::Standby},
};

// Serves two starts in a row after an idle period.
const MIN_STANDBYS: usize = 2;
// More than the largest burst that is documented (100 creates).
const MAX_STANDBYS: u64 = 128;
// Memory of one standby, besides a dozen cgroups and a network namespace.
const STANDBY_KIB: u64 = 700;
// All standbys together use at most 1/256 of the host's memory.
const MEMORY_DIVISOR: u64 = 256;
// Each standby has four files open; clients and sandboxes need most of the limit.
const FILES_DIVISOR: u64 = 64;
// A burst older than this no longer counts.
const BURST_MEMORY: Duration = Duration::from_secs(600);

/// The standbys and how many are wanted.
pub(super) struct StandbyPool {
    waiting: Vec<Standby>,
    /// A sandbox was started, and none of its steps before the assignment depends on its limits:
    /// without root, pid 1 has the sandbox's process limit from its start.
    enabled: bool,
    demand: Demand,
    limit: usize,
    /// Since this zygote started; `ready` is counted on request.
    counts: StandbyCounts,
}

impl StandbyPool {
    /// An empty pool with a maximum that fits this host.
    pub(super) fn new() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self {
            waiting: Vec::new(),
            enabled: false,
            demand: Demand::default(),
            limit: pool_limit(kib, files),
            counts: StandbyCounts::default(),
        }
    }
}

/// The maximum for a host with this much memory and a zygote that may open this many files.
fn pool_limit(memory_kib: u64, files: u64) -> usize {
    let limit =
        MAX_STANDBYS.min(memory_kib / MEMORY_DIVISOR / STANDBY_KIB).min(files / FILES_DIVISOR);
    usize::try_from(limit).unwrap_or(usize::MAX).max(MIN_STANDBYS)
}

/// Sizes of recent bursts: starts without an idle period between them.
#[derive(Debug, Default)]
struct Demand {
    /// Starts since the last idle period.
    burst: usize,
    /// The largest remembered burst, and when one of that size last came.
    largest: Option<(usize, Instant)>,
}

impl Demand {
    fn start(&mut self, now: Instant) {
        self.burst += 1;
        if self.largest.is_none_or(|(largest, _)| largest <= self.burst) {
            self.largest = Some((self.burst, now));
        }
    }

    fn idle(&mut self, now: Instant) {
        self.burst = 0;
        self.largest =
            self.largest.filter(|(_, at)| now.saturating_duration_since(*at) < BURST_MEMORY);
    }

    fn wanted(&self, limit: usize) -> usize {
        self.largest.map_or(MIN_STANDBYS, |(largest, _)| largest.clamp(MIN_STANDBYS, limit))
    }
}

impl SandboxTable {
    /// A preforked process with this sandbox's limits, from the pool if possible.
    pub(super) fn standby_for(
        &mut self,
        record: &Record,
        plan: &Plan,
    ) -> Result<Standby, StepError> {
        self.standbys.enabled = facts::id_allocation() == IdAllocation::PerSandbox;
        self.standbys.demand.start(Instant::now());
        while let Some(at) = self
            .standbys
            .waiting
            .iter()
            .position(Standby::is_ready)
            .filter(|_| record.network != Network::Host)
        {
            let standby = self.standbys.waiting.swap_remove(at);
            let dead = || StepError::new("find the process", io::ErrorKind::NotFound);
            let usable = if standby.lives() { standby.set_limits(plan) } else { Err(dead()) };
            match usable {
                Ok(()) => {
                    self.standbys.counts.used += 1;
                    return Ok(standby);
                }
                Err(error) => {
                    eprintln!("discarding a standby: {}", error.line());
                    standby.discard(&self.cgroups);
                }
            }
        }
        self.standbys.counts.missed += 1;
        self.prefork(plan)
    }

    pub(in crate::zygote) fn standby_counts(&self) -> StandbyCounts {
        let ready = self.standbys.waiting.iter().filter(|standby| standby.is_ready()).count();
        StandbyCounts { ready: u64::try_from(ready).unwrap_or(u64::MAX), ..self.standbys.counts }
    }

    fn prefork(&mut self, plan: &Plan) -> Result<Standby, StepError> {
        self.spawn_counter = self.spawn_counter.wrapping_add(1);
        let supervisor = self.supervisor.program()?;
        Standby::prefork(plan, &self.cgroups, &self.claims, self.spawn_counter, supervisor)
    }

    /// While idle: preforks one standby or discards one that is too many; false when the number is
    /// right.
    pub(in crate::zygote) fn prefork_standby(&mut self, now: Instant) -> bool {
        if !self.standbys.enabled {
            return false;
        }
        self.standbys.demand.idle(now);
        let wanted = self.standbys.demand.wanted(self.standbys.limit);
        if self.standbys.waiting.len() >= wanted {
            let too_many = self.standbys.waiting.len() > wanted;
            if let Some(standby) = self.standbys.waiting.pop_if(|_| too_many) {
                standby.discard(&self.cgroups);
            }
            return too_many;
        }
        let plan = self.plan(&Record::of_a_standby(), &[], String::new());
        match self.prefork(&plan) {
            Ok(standby) => {
                self.standbys.counts.preforked += 1;
                self.standbys.waiting.push(standby);
            }
            Err(error) => {
                eprintln!("cannot prefork a standby: {}", error.line());
                self.standbys.enabled = false;
            }
        }
        true
    }

    pub(in crate::zygote) fn discard_standbys(&mut self) {
        for standby in self.standbys.waiting.drain(..) {
            standby.discard(&self.cgroups);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_size_follows_largest_burst_within_bounds() {
        let now = Instant::now();
        let mut demand = Demand::default();
        assert_eq!(demand.wanted(16), MIN_STANDBYS);
        (0..7).for_each(|_| demand.start(now));
        demand.idle(now);
        assert_eq!(demand.wanted(16), 7);
        (0..3).for_each(|_| demand.start(now));
        demand.idle(now);
        assert_eq!(demand.wanted(16), 7, "a smaller burst changes nothing");
        (0..100).for_each(|_| demand.start(now));
        assert_eq!(demand.wanted(16), 16);
    }

    #[test]
    fn burst_is_forgotten_unless_repeated() {
        let now = Instant::now();
        let mut demand = Demand::default();
        (0..5).for_each(|_| demand.start(now));
        let later = now + BURST_MEMORY - Duration::from_secs(1);
        demand.idle(later);
        assert_eq!(demand.wanted(16), 5);
        (0..5).for_each(|_| demand.start(later));
        demand.idle(now + BURST_MEMORY);
        assert_eq!(demand.wanted(16), 5, "the burst was repeated");
        demand.idle(later + BURST_MEMORY);
        assert_eq!(demand.wanted(16), MIN_STANDBYS);
    }

    #[test]
    fn pool_limit_depends_on_memory_and_files() {
        let mib = 1 << 10;
        assert_eq!(pool_limit(512 * mib, 1 << 20), MIN_STANDBYS);
        assert_eq!(pool_limit(4096 * mib, 1 << 20), 23);
        assert_eq!(pool_limit(4096 * mib, 1024), 16);
        assert_eq!(pool_limit(1 << 40, 1 << 20), 128);
        assert_eq!(pool_limit(0, 0), MIN_STANDBYS);
    }
}
