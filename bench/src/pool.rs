//! The rows of many sandboxes at once: a hundred created in one burst, and commands in two hundred
//! that live. A stage of its own, with bubblewrap and a plain fork taking turns: the two hundred would
//! be in the way of every other row.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use harvest_engine::{Running, Spec};

use crate::{
    contest::{Contestant, run as contest},
    harvest::in_sandbox,
    options::Options,
    peers,
    place::Place,
    report::Report,
};

/// A hundred creates asked for at once, until the last is answered.
pub(crate) const BURST: &str = "harvest burst: 100 creates";
/// The same, until each has run a command.
pub(crate) const BURST_RUN: &str = "harvest burst: 100 × create → true → exit";
/// The slowest but one in a hundred of the commands four callers run in sandboxes that lie idle.
pub(crate) const LIVE_P99: &str = "harvest exec p99, 200 live, 4 callers";
/// The middle one of them.
const LIVE_P50: &str = "harvest exec p50, 200 live, 4 callers";
/// What the row of the burst is compared with.
pub(crate) const BUBBLEWRAPS: [&str; 2] =
    ["bubblewrap, overlay on tmpfs, beside bursts", "bubblewrap, read-only root, beside bursts"];
/// What the row of the two hundred is compared with.
pub(crate) const FORK_EXEC: &str = "plain fork+exec, beside 200 live";

const BURST_SIZE: usize = 100;
const LIVE: usize = 200;
const CALLERS: usize = 4;
// Bursts come seldom, and the zygote needs a second or two to have as many ready again.
const REST: Duration = Duration::from_secs(5);
// Enough for a p99 that is not the slowest one.
const CALLS: usize = 50;

/// Measures the rows and adds them to the report.
pub(crate) fn run(place: &Place, options: &Options, report: &mut Report) -> Result<()> {
    let mut contestants = vec![Contestant::parts(&[BURST, BURST_RUN], || {
        thread::sleep(if options.quick { Duration::ZERO } else { REST });
        burst(place)
    })];
    if options.peers {
        peers::bubblewrap(place, BUBBLEWRAPS).enter(&mut contestants, report);
    }
    // A burst is a hundred samples in one.
    let rounds = (options.rounds / 5).max(1);
    report.add(contest(&mut contestants, rounds, options.gap)?);
    drop(contestants);
    eprintln!("starting {LIVE} sandboxes");
    let live: Vec<Running> =
        (0..LIVE).map(|_| Ok(place.engine.start(&place.spec()?)?)).collect::<Result<_>>()?;
    let mut seed = 1;
    let mut contestants = vec![
        peers::fork_exec_as(FORK_EXEC, place),
        Contestant::parts(&[LIVE_P99, LIVE_P50], || {
            seed += 1;
            calls(&live, seed)
        }),
    ];
    report.add(contest(&mut contestants, rounds, options.gap)?);
    drop(contestants);
    for one in &live {
        place.engine.remove(&one.id)?;
    }
    Ok(())
}

/// As many threads as sandboxes: nobody waits for another's answer.
fn burst(place: &Place) -> Result<Vec<Duration>> {
    let specs: Vec<Spec> = (0..BURST_SIZE).map(|_| place.spec()).collect::<Result<_>>()?;
    let began = Instant::now();
    let one = |spec: &Spec| -> Result<(Duration, Duration)> {
        let running = place.engine.start(spec)?;
        let created = began.elapsed();
        in_sandbox(&running.bridge, &["true"])?;
        Ok((created, began.elapsed()))
    };
    let took = at_once(&specs, &one)?;
    at_once(&specs, &|spec: &Spec| Ok(place.engine.remove(&spec.id)?))?;
    let last =
        |of: fn(&(Duration, Duration)) -> Duration| took.iter().map(of).max().unwrap_or_default();
    Ok(vec![last(|took| took.0), last(|took| took.1)])
}

/// Does something with each of them, all at the same time.
fn at_once<S: Sync, T: Send>(all: &[S], act: &(impl Fn(&S) -> Result<T> + Sync)) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(move || act(one))).collect();
        threads
            .into_iter()
            .map(|one| one.join().map_err(|_| anyhow!("a thread of the bench died"))?)
            .collect()
    })
}

/// Four callers, each running commands in one sandbox after another.
fn calls(live: &[Running], seed: usize) -> Result<Vec<Duration>> {
    let callers: Vec<usize> = (0..CALLERS).collect();
    let mut taken: Vec<Duration> = at_once(&callers, &|caller: &usize| {
        (0..CALLS)
            .map(|call| {
                // Another one each time, so that none is warm from the call before.
                let at = (seed * 31 + caller * LIVE / CALLERS + call * 7) % live.len();
                let began = Instant::now();
                in_sandbox(&live[at].bridge, &["true"])?;
                Ok(began.elapsed())
            })
            .collect::<Result<Vec<_>>>()
    })?
    .concat();
    taken.sort_unstable();
    let at =
        |percent: usize| taken.get((taken.len() - 1) * percent / 100).copied().context("no calls");
    Ok(vec![at(99)?, at(50)?])
}
