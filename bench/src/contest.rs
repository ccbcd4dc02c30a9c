//! Takes turns: every round asks each contestant once, after an idle gap, so that all of them meet
//! the same weather. Rounds begin with another one each time.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

type Run<'a> = Box<dyn FnMut() -> Result<Vec<Duration>> + 'a>;

/// Somebody who does the thing measured, and says how long each part took.
pub(crate) struct Contestant<'a> {
    /// One name per part.
    pub(crate) rows: Vec<&'static str>,
    run: Run<'a>,
}

impl<'a> Contestant<'a> {
    /// Says itself how long each of its rows took; what it does besides is not measured.
    pub(crate) fn parts(
        rows: &[&'static str],
        run: impl FnMut() -> Result<Vec<Duration>> + 'a,
    ) -> Self {
        Self { rows: rows.to_vec(), run: Box::new(run) }
    }

    /// Is timed as a whole.
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

/// Lets all of them take turns. Two rounds more than asked for come first and do not count.
pub(crate) fn run(
    contestants: &mut [Contestant<'_>],
    rounds: usize,
    gap: Duration,
) -> Result<Vec<Samples>> {
    const WARMING: usize = 2;
    let mut all: Vec<Vec<Samples>> = contestants
        .iter()
        .map(|one| one.rows.iter().map(|row| Samples { row, taken: Vec::new() }).collect())
        .collect();
    let count = contestants.len();
    for round in 0..WARMING + rounds {
        for turn in 0..count {
            let at = (turn + round) % count;
            thread::sleep(gap);
            let taken = contestants[at].sample()?;
            if round >= WARMING {
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
    fn every_round_asks_everybody_once_and_begins_with_another() {
        let asked = RefCell::new(String::new());
        let one = |name: &'static str| {
            let asked = &asked;
            Contestant::whole(name, move || {
                asked.borrow_mut().push_str(name);
                Ok(())
            })
        };
        let samples = run(&mut [one("a"), one("b"), one("c")], 1, Duration::ZERO).unwrap();
        assert_eq!(*asked.borrow(), "abcbcacab");
        assert!(samples.iter().all(|samples| samples.taken.len() == 1));
    }
}
