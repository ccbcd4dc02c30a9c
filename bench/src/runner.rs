//! Runs benchmarks interleaved: every round runs each once, after an idle gap, so that all see the
//! same load. Each round starts with a different one.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

type Run<'a> = Box<dyn FnMut() -> Result<Vec<Duration>> + 'a>;

/// Something to measure, which produces one sample for each of its rows.
pub(crate) struct Benchmark<'a> {
    pub(crate) rows: Vec<&'static str>,
    run: Run<'a>,
}

impl<'a> Benchmark<'a> {
    /// A benchmark that measures its rows itself; the rest of its work is not measured.
    pub(crate) fn parts(
        rows: &[&'static str],
        run: impl FnMut() -> Result<Vec<Duration>> + 'a,
    ) -> Self {
        Self { rows: rows.to_vec(), run: Box::new(run) }
    }

    /// A benchmark that is timed from start to end.
    pub(crate) fn whole(row: &'static str, mut run: impl FnMut() -> Result<()> + 'a) -> Self {
        Self::parts(&[row], move || {
            let began = Instant::now();
            run()?;
            Ok(vec![began.elapsed()])
        })
    }

    /// One sample of each row.
    pub(crate) fn sample(&mut self) -> Result<Vec<Duration>> {
        (self.run)().with_context(|| format!("`{}` failed", self.rows[0]))
    }
}

/// All samples of one row.
#[derive(Debug)]
pub(crate) struct Samples {
    pub(crate) row: &'static str,
    pub(crate) taken: Vec<Duration>,
}

/// Runs all benchmarks interleaved, after two uncounted warm-up rounds.
pub(crate) fn run(
    benchmarks: &mut [Benchmark<'_>],
    rounds: usize,
    gap: Duration,
) -> Result<Vec<Samples>> {
    const WARMUP_ROUNDS: usize = 2;
    let mut all: Vec<Vec<Samples>> = benchmarks
        .iter()
        .map(|one| one.rows.iter().map(|row| Samples { row, taken: Vec::new() }).collect())
        .collect();
    let count = benchmarks.len();
    for round in 0..WARMUP_ROUNDS + rounds {
        for turn in 0..count {
            let at = (turn + round) % count;
            thread::sleep(gap);
            let taken = benchmarks[at].sample()?;
            if round >= WARMUP_ROUNDS {
                for (samples, took) in all[at].iter_mut().zip(taken) {
                    samples.taken.push(took);
                }
            }
        }
    }
    Ok(all.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn every_round_runs_all_in_rotated_order() {
        let order = RefCell::new(String::new());
        let one = |name: &'static str| {
            let order = &order;
            Benchmark::whole(name, move || {
                order.borrow_mut().push_str(name);
                Ok(())
            })
        };
        let samples = run(&mut [one("a"), one("b"), one("c")], 1, Duration::ZERO).unwrap();
        assert_eq!(*order.borrow(), "abcbcacab");
        assert!(samples.iter().all(|samples| samples.taken.len() == 1));
    }
}
