//! Pid 1s ahead of their sandboxes: grown in quiet moments, used once, as many as starts come in a row.

use std::{
    fs, io,
    time::{Duration, Instant},
};

use rustix::process::{Resource, getrlimit};

use super::Nursery;
use crate::{
    error::StepError, plan::Plan, sandbox::Record, seeds::SeedCounts, spec::Network,
    zygote::seed::Seed,
};

// Two starts in a row after an idle moment.
const FEWEST: usize = 2;
// A burst that is written about, and some.
const MOST: u64 = 128;
// What each keeps of the host's memory, besides a dozen cgroups and a network namespace.
const SEED_KIB: u64 = 700;
// All together never more than this part of the host's memory.
const PART_OF_MEMORY: u64 = 256;
// Each has four files open; clients and sandboxes need most of what there is.
const PART_OF_FILES: u64 = 64;
// After so long without another, a burst is history.
const REMEMBERED: Duration = Duration::from_secs(600);

/// What waits, and for how many it waits.
pub(super) struct Seeds {
    waiting: Vec<Seed>,
    /// A sandbox was started, on a host where seeds thrive.
    wanted: bool,
    demand: Demand,
    most: usize,
    /// Since this zygote was started; those that are ready are counted when somebody asks.
    counts: SeedCounts,
}

impl Seeds {
    /// None yet, and never more than this host can spare.
    pub(super) fn new() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self {
            waiting: Vec::new(),
            wanted: false,
            demand: Demand::default(),
            most: most(kib, files),
            counts: SeedCounts::default(),
        }
    }
}

/// How many a host with so much memory can spare, for a zygote that may open so many files.
fn most(memory_kib: u64, files: u64) -> usize {
    let most = MOST.min(memory_kib / PART_OF_MEMORY / SEED_KIB).min(files / PART_OF_FILES);
    usize::try_from(most).unwrap_or(usize::MAX).max(FEWEST)
}

/// How many starts come before there is time to grow the next seed.
#[derive(Debug, Default)]
struct Demand {
    /// Since the last quiet moment.
    burst: usize,
    /// The longest burst that is remembered, and when one was as long.
    longest: Option<(usize, Instant)>,
}

impl Demand {
    fn start(&mut self, now: Instant) {
        self.burst += 1;
        if self.longest.is_none_or(|(longest, _)| longest <= self.burst) {
            self.longest = Some((self.burst, now));
        }
    }

    fn quiet(&mut self, now: Instant) {
        self.burst = 0;
        self.longest =
            self.longest.filter(|(_, at)| now.saturating_duration_since(*at) < REMEMBERED);
    }

    fn wanted(&self, most: usize) -> usize {
        self.longest.map_or(FEWEST, |(longest, _)| longest.clamp(FEWEST, most))
    }
}

impl Nursery {
    /// A process that has taken the steps up to the gate, under this sandbox's name.
    pub(super) fn seed_for(&mut self, record: &Record, plan: &Plan) -> Result<Seed, StepError> {
        self.seeds.wanted = self.cgroups.renames();
        self.seeds.demand.start(Instant::now());
        let part = record.id.part();
        while let Some(at) = self
            .seeds
            .waiting
            .iter()
            .position(Seed::is_ready)
            .filter(|_| record.network == Network::Door)
        {
            let mut seed = self.seeds.waiting.swap_remove(at);
            let dead = || StepError::new("find the process", io::ErrorKind::NotFound.into());
            let renamed = if seed.lives() {
                seed.rename(&self.cgroups, &self.group, part, plan)
            } else {
                Err(dead())
            };
            match renamed {
                Ok(()) => {
                    self.seeds.counts.used += 1;
                    return Ok(seed);
                }
                Err(error) => {
                    eprintln!("a seed is of no use: {}", error.line());
                    seed.discard(&self.cgroups, &self.group);
                }
            }
        }
        self.seeds.counts.missed += 1;
        self.grow(plan)
    }

    /// How many there are and were.
    pub(in crate::zygote) fn seed_counts(&self) -> SeedCounts {
        let ready = self.seeds.waiting.iter().filter(|seed| seed.is_ready()).count();
        SeedCounts { ready: u64::try_from(ready).unwrap_or(u64::MAX), ..self.seeds.counts }
    }

    fn grow(&mut self, plan: &Plan) -> Result<Seed, StepError> {
        self.births = self.births.wrapping_add(1);
        let supervisor = self.supervisor.program()?;
        Seed::grow(plan, &self.cgroups, &self.group, &self.claims, self.births, supervisor)
    }

    /// In a quiet moment: grows a seed ahead of time, or ends one too many; false when there are enough.
    pub(in crate::zygote) fn grow_seed(&mut self, now: Instant) -> bool {
        if !self.seeds.wanted {
            return false;
        }
        self.seeds.demand.quiet(now);
        let wanted = self.seeds.demand.wanted(self.seeds.most);
        if self.seeds.waiting.len() >= wanted {
            let too_many = self.seeds.waiting.len() > wanted;
            if let Some(seed) = self.seeds.waiting.pop_if(|_| too_many) {
                seed.discard(&self.cgroups, &self.group);
            }
            return too_many;
        }
        let plan = self.plan(&Record::of_a_seed(), &[], String::new());
        match self.grow(&plan) {
            Ok(seed) => {
                self.seeds.counts.grown += 1;
                self.seeds.waiting.push(seed);
            }
            Err(error) => {
                eprintln!("cannot grow a seed: {}", error.line());
                self.seeds.wanted = false;
            }
        }
        true
    }

    pub(super) fn discard_seeds(&mut self) {
        for seed in self.seeds.waiting.drain(..) {
            seed.discard(&self.cgroups, &self.group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_seeds_wait_as_starts_came_in_a_row_within_bounds() {
        let now = Instant::now();
        let mut demand = Demand::default();
        assert_eq!(demand.wanted(16), FEWEST);
        (0..7).for_each(|_| demand.start(now));
        demand.quiet(now);
        assert_eq!(demand.wanted(16), 7);
        (0..3).for_each(|_| demand.start(now));
        demand.quiet(now);
        assert_eq!(demand.wanted(16), 7, "a shorter one changes nothing");
        (0..100).for_each(|_| demand.start(now));
        assert_eq!(demand.wanted(16), 16);
    }

    #[test]
    fn a_burst_is_forgotten_when_none_as_long_comes_again() {
        let now = Instant::now();
        let mut demand = Demand::default();
        (0..5).for_each(|_| demand.start(now));
        let later = now + REMEMBERED - Duration::from_secs(1);
        demand.quiet(later);
        assert_eq!(demand.wanted(16), 5);
        (0..5).for_each(|_| demand.start(later));
        demand.quiet(now + REMEMBERED);
        assert_eq!(demand.wanted(16), 5, "it came again");
        demand.quiet(later + REMEMBERED);
        assert_eq!(demand.wanted(16), FEWEST);
    }

    #[test]
    fn a_small_host_keeps_few_seeds_and_a_large_one_not_too_many() {
        let mib = 1 << 10;
        assert_eq!(most(512 * mib, 1 << 20), FEWEST);
        assert_eq!(most(4096 * mib, 1 << 20), 23);
        assert_eq!(most(4096 * mib, 1024), 16);
        assert_eq!(most(1 << 40, 1 << 20), 128);
        assert_eq!(most(0, 0), FEWEST);
    }
}
