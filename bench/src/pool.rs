//! Rows with many sandboxes: a burst of a hundred creates, and commands in two hundred idle
//! sandboxes. Measured apart from the other rows, which two hundred sandboxes would disturb, and
//! interleaved with bubblewrap and a plain fork.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use harvest_engine::{Running, Spec};

use crate::{
    harvest::in_sandbox,
    options::Options,
    peers,
    report::Report,
    runner::{Benchmark, run as run_interleaved},
    workspace::Workspace,
};

/// A hundred concurrent creates, until the last returns.
pub(crate) const BURST: &str = "harvest burst: 100 creates";
/// The same, until each sandbox has run a command.
pub(crate) const BURST_RUN: &str = "harvest burst: 100 × create → true → exit";
/// The 99th percentile of commands that four callers run in idle sandboxes.
pub(crate) const LIVE_P99: &str = "harvest exec p99, 200 live, 4 callers";
/// The median of these.
const LIVE_P50: &str = "harvest exec p50, 200 live, 4 callers";
/// What the burst is compared with.
pub(crate) const BUBBLEWRAPS: [&str; 2] =
    ["bubblewrap, overlay on tmpfs, beside bursts", "bubblewrap, read-only root, beside bursts"];
/// What commands in the two hundred sandboxes are compared with.
pub(crate) const FORK_EXEC: &str = "plain fork+exec, beside 200 live";

const BURST_SIZE: usize = 100;
const LIVE: usize = 200;
const CALLERS: usize = 4;
// Bursts are rare, and the zygote needs a second or two to prepare as many standbys again.
const REST: Duration = Duration::from_secs(5);
// Enough that the p99 is not the maximum.
const CALLS: usize = 50;

/// Measures the rows and adds them to the report.
pub(crate) fn run(workspace: &Workspace, options: &Options, report: &mut Report) -> Result<()> {
    let mut benchmarks = vec![Benchmark::parts(&[BURST, BURST_RUN], || {
        thread::sleep(if options.quick { Duration::ZERO } else { REST });
        burst(workspace)
    })];
    if options.peers {
        peers::bubblewrap(workspace, BUBBLEWRAPS).add_if_working(&mut benchmarks, report);
    }
    // Fewer rounds, since a burst is a hundred samples in one.
    let rounds = (options.rounds / 5).max(1);
    report.add(run_interleaved(&mut benchmarks, rounds, options.gap)?);
    drop(benchmarks);
    eprintln!("starting {LIVE} sandboxes");
    let live: Vec<Running> = (0..LIVE)
        .map(|_| Ok(workspace.engine.start(&workspace.spec()?)?))
        .collect::<Result<_>>()?;
    let mut seed = 1;
    let mut benchmarks = vec![
        peers::fork_exec_as(FORK_EXEC, workspace),
        Benchmark::parts(&[LIVE_P99, LIVE_P50], || {
            seed += 1;
            run_commands(&live, seed)
        }),
    ];
    report.add(run_interleaved(&mut benchmarks, rounds, options.gap)?);
    drop(benchmarks);
    for one in &live {
        workspace.engine.remove(&one.id)?;
    }
    Ok(())
}

/// One thread per sandbox, so that no create waits for another.
fn burst(workspace: &Workspace) -> Result<Vec<Duration>> {
    let specs: Vec<Spec> = (0..BURST_SIZE).map(|_| workspace.spec()).collect::<Result<_>>()?;
    let began = Instant::now();
    let one = |spec: &Spec| -> Result<(Duration, Duration)> {
        let running = workspace.engine.start(spec)?;
        let created = began.elapsed();
        in_sandbox(&running.bridge, &["true"])?;
        Ok((created, began.elapsed()))
    };
    let took = at_once(&specs, &one)?;
    at_once(&specs, &|spec: &Spec| Ok(workspace.engine.remove(&spec.id)?))?;
    let last =
        |of: fn(&(Duration, Duration)) -> Duration| took.iter().map(of).max().unwrap_or_default();
    Ok(vec![last(|took| took.0), last(|took| took.1)])
}

/// Runs `act` on all items concurrently.
fn at_once<S: Sync, T: Send>(all: &[S], act: &(impl Fn(&S) -> Result<T> + Sync)) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(move || act(one))).collect();
        threads
            .into_iter()
            .map(|one| one.join().map_err(|_| anyhow!("a benchmark thread panicked"))?)
            .collect()
    })
}

/// Four callers, each running commands in one sandbox after another.
fn run_commands(live: &[Running], seed: usize) -> Result<Vec<Duration>> {
    let callers: Vec<usize> = (0..CALLERS).collect();
    let mut taken: Vec<Duration> = at_once(&callers, &|caller: &usize| {
        (0..CALLS)
            .map(|call| {
                // A different sandbox each time, so that none is warm from the previous call.
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
