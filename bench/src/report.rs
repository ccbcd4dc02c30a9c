//! Formats samples as a table with ratios between rows of the same run, and shows which targets are
//! met.

use std::{fmt, time::Duration};

use serde::Serialize;

use crate::{
    agents, disks, gateway, growth, harvest, http, large,
    machine::{Load, Machine},
    memory::{Memory, TARGET_KIB},
    peers, pool,
    runner::Samples,
    sessions, store, writes,
};

/// The results of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    machine: Machine,
    rows: Vec<Row>,
    pub(crate) skipped: Vec<(String, String)>,
    pub(crate) memory: Option<Memory>,
    memory_rows: Vec<MemoryRow>,
}

/// A memory measurement with its target.
#[derive(Debug, Serialize)]
struct MemoryRow {
    what: String,
    kib: u64,
    limit_kib: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    name: String,
    samples: usize,
    min_ms: f64,
    p50_ms: f64,
    p95_ms: f64,
    max_ms: f64,
    /// p50 as a multiple of another row's.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<Ratio>,
    /// The target for p50, for rows with an absolute one.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ms: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Ratio {
    to: String,
    is: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<f64>,
}

const BUBBLEWRAPS: &[&str] = &[peers::BUBBLEWRAP, peers::BUBBLEWRAP_READ_ONLY];

/// Relative targets: the row, the rows it is compared with, and the maximum ratio.
const TARGETS: [(&str, &[&str], f64); 8] = [
    (harvest::COLD, BUBBLEWRAPS, 1.2),
    (harvest::COLD_REMOVED, BUBBLEWRAPS, 1.2),
    (http::FIRST_OUTPUT, BUBBLEWRAPS, 1.5),
    (harvest::EXEC, &[peers::FORK_EXEC], 2.5),
    (disks::FORK, &[disks::SUBVOLUME], 3.0),
    (disks::SNAPSHOT, &[disks::COPY], 0.1),
    (pool::BURST, &pool::BUBBLEWRAPS, 60.0),
    (pool::LIVE_P99, &[pool::FORK_EXEC], 20.0),
];

impl Report {
    pub(crate) fn new(machine: Machine) -> Self {
        Self {
            machine,
            rows: Vec::new(),
            skipped: Vec::new(),
            memory: None,
            memory_rows: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, samples: Vec<Samples>) {
        self.rows.extend(samples.into_iter().filter(|one| !one.taken.is_empty()).map(Row::of));
    }

    pub(crate) fn add_memory(&mut self, what: String, kib: u64, limit_kib: u64) {
        self.memory_rows.push(MemoryRow { what, kib, limit_kib });
    }

    /// Computes the ratios and records the machine's load after the run.
    pub(crate) fn finish(&mut self) {
        self.machine.busy_after = Load::now();
        compare(&mut self.rows);
    }
}

impl Row {
    fn of(samples: Samples) -> Self {
        let mut taken = samples.taken;
        taken.sort_unstable();
        Self {
            name: samples.row.to_owned(),
            samples: taken.len(),
            min_ms: percentile(&taken, 0),
            p50_ms: percentile(&taken, 50),
            p95_ms: percentile(&taken, 95),
            max_ms: percentile(&taken, 100),
            ratio: None,
            limit_ms: store::LIMITS
                .iter()
                .chain(&sessions::LIMITS)
                .chain(&agents::LIMITS)
                .chain(&gateway::LIMITS)
                .find(|(name, _)| *name == samples.row)
                .map(|(_, limit)| *limit),
        }
    }
}

/// A percentile of sorted samples, in milliseconds with microsecond precision.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let micros = sorted[(sorted.len() - 1) * percent / 100].as_micros();
    f64::from(u32::try_from(micros).unwrap_or(u32::MAX)) / 1000.0
}

fn compare(rows: &mut [Row]) {
    let known = rows.to_vec();
    let find = |names: &[&str]| known.iter().find(|row| names.contains(&row.name.as_str()));
    for row in rows {
        let mut targets = TARGETS
            .iter()
            .chain(&agents::TARGETS)
            .chain(&growth::TARGETS)
            .chain(&large::TARGETS)
            .chain(&writes::TARGETS);
        let (names, target) = match targets.find(|(name, ..)| *name == row.name) {
            Some((_, names, target)) => (*names, Some(*target)),
            // Copying disks and writing events are not comparable to starting a process.
            None if agents::is_row(&row.name)
                || disks::is_row(&row.name)
                || gateway::is_row(&row.name)
                || growth::is_row(&row.name)
                || large::is_row(&row.name)
                || store::is_row(&row.name)
                || sessions::is_row(&row.name)
                || writes::is_row(&row.name) =>
            {
                continue;
            }
            None => (BUBBLEWRAPS, None),
        };
        row.ratio = find(names).filter(|other| other.p50_ms > 0.0).map(|other| Ratio {
            to: other.name.clone(),
            is: (row.p50_ms / other.p50_ms * 100.0).round() / 100.0,
            target,
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}", self.machine.line())?;
        writeln!(out, "before: {}", self.machine.busy_before.line())?;
        writeln!(out, "after:  {}\n", self.machine.busy_after.line())?;
        writeln!(out, "| ms | n | min | p50 | p95 | ratio | target | |")?;
        writeln!(out, "|---|---:|---:|---:|---:|---|---|---|")?;
        for row in &self.rows {
            write!(
                out,
                "| {} | {} | {:.2} | {:.2} | {:.2} ",
                row.name, row.samples, row.min_ms, row.p50_ms, row.p95_ms
            )?;
            match &row.ratio {
                Some(Ratio { to, is, target: Some(target) }) => {
                    let verdict = if is <= target { "met" } else { "not met" };
                    writeln!(out, "| {is:.2} × {} | ≤ {target} | {verdict} |", short(to))?;
                }
                Some(Ratio { to, is, target: None }) => {
                    writeln!(out, "| {is:.2} × {} | | |", short(to))?
                }
                None => match row.limit_ms {
                    Some(limit) => {
                        let verdict = if row.p50_ms <= limit { "met" } else { "not met" };
                        writeln!(out, "| | ≤ {limit} ms | {verdict} |")?;
                    }
                    None => writeln!(out, "| | | |")?,
                },
            }
        }
        if let Some(memory) = &self.memory {
            writeln!(out)?;
            let verdict = if memory.pid_1_kib() <= TARGET_KIB { "met" } else { "not met" };
            let pid_1 = memory.pid_1_kib();
            writeln!(
                out,
                "private memory of pid 1 after {} execs: {pid_1} KiB (≤ {TARGET_KIB}: {verdict})",
                memory.execs
            )?;
            let parts: Vec<String> = memory
                .processes
                .iter()
                .map(|one| format!("{} {}", one.role, one.private_kib))
                .collect();
            writeln!(
                out,
                "all platform processes of the sandbox: {} KiB ({})",
                memory.all_kib(),
                parts.join(", ")
            )?;
        }
        for MemoryRow { what, kib, limit_kib } in &self.memory_rows {
            let verdict = if kib <= limit_kib { "met" } else { "not met" };
            writeln!(out, "{what}: {kib} KiB (≤ {limit_kib}: {verdict})")?;
        }
        for (row, reason) in &self.skipped {
            writeln!(out, "skipped: {row}: {reason}")?;
        }
        Ok(())
    }
}

fn short(name: &str) -> &str {
    name.split(',').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, millis: &[u64]) -> Row {
        Row::of(Samples {
            row: name,
            taken: millis.iter().map(|ms| Duration::from_millis(*ms)).collect(),
        })
    }

    #[test]
    fn p50_is_the_median_of_unsorted_samples() {
        let row = row("x", &[9, 1, 5]);
        assert_eq!((row.min_ms, row.p50_ms, row.max_ms), (1.0, 5.0, 9.0));
    }

    #[test]
    fn a_target_is_compared_with_its_own_row() {
        let mut rows =
            [row(harvest::EXEC, &[4]), row(peers::FORK_EXEC, &[2]), row(peers::BUBBLEWRAP, &[8])];
        compare(&mut rows);
        let ratio = rows[0].ratio.clone().unwrap();
        assert_eq!((ratio.to.as_str(), ratio.is, ratio.target), (peers::FORK_EXEC, 2.0, Some(2.5)));
    }

    #[test]
    fn disk_rows_are_not_compared_with_starts() {
        let mut rows = [row(disks::COPY, &[4000]), row(peers::BUBBLEWRAP, &[8])];
        compare(&mut rows);
        assert_eq!(rows[0].ratio, None);
    }

    #[test]
    fn store_rows_have_limits_in_milliseconds() {
        let mut rows = [row(store::OPEN_SQLITE, &[4]), row(peers::BUBBLEWRAP, &[8])];
        compare(&mut rows);
        assert_eq!((rows[0].ratio.clone(), rows[0].limit_ms), (None, Some(100.0)));
        assert_eq!(rows[1].limit_ms, None);
    }

    #[test]
    fn a_missing_reference_row_means_no_ratio() {
        let mut rows = [row(harvest::COLD, &[4])];
        compare(&mut rows);
        assert_eq!(rows[0].ratio, None);
    }
}
