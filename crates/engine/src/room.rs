//! Who is refused first when a disk fills up: builds, then new sandboxes, then snapshots. Work that
//! runs is never refused anything here; what it asks of the disk, the disk answers.

use std::path::{Path, PathBuf};

use rustix::fs::statvfs;

use crate::{Engine, EngineError, error::AtPath};

/// What somebody wants to do that takes room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Build,
    Sandbox,
    Snapshot,
}

/// How much of a disk is to stay free: a share of it, within bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threshold {
    /// In thousandths of the disk.
    pub permille: u64,
    /// At least this, however small the disk.
    pub at_least_bytes: u64,
    /// No more than this, however large the disk.
    pub at_most_bytes: u64,
}

impl Threshold {
    const NONE: Self = Self { permille: 0, at_least_bytes: 0, at_most_bytes: 0 };

    fn bytes(self, total: u64) -> u64 {
        let share = total / 1000 * self.permille;
        share.max(self.at_least_bytes).min(self.at_most_bytes)
    }
}

/// Below how much free space each is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Builds of images.
    pub build: Threshold,
    /// New sandboxes.
    pub sandbox: Threshold,
    /// Snapshots of sandboxes that go on.
    pub snapshot: Threshold,
}

const MIB: u64 = 1 << 20;

impl Default for Thresholds {
    fn default() -> Self {
        let threshold = |permille, at_least: u64, at_most: u64| Threshold {
            permille,
            at_least_bytes: at_least * MIB,
            at_most_bytes: at_most * MIB,
        };
        Self {
            build: threshold(50, 2048, 20_480),
            sandbox: threshold(20, 512, 8192),
            snapshot: threshold(10, 128, 2048),
        }
    }
}

impl Thresholds {
    /// Nothing is refused: for tests, which may run on a disk that is nearly full.
    pub const NONE: Self =
        Self { build: Threshold::NONE, sandbox: Threshold::NONE, snapshot: Threshold::NONE };

    fn of(&self, what: What) -> Threshold {
        match what {
            What::Build => self.build,
            What::Sandbox => self.sandbox,
            What::Snapshot => self.snapshot,
        }
    }
}

/// How much would have to be free, when that is more than is.
fn lacking(free: u64, total: u64, what: What, thresholds: &Thresholds) -> Option<u64> {
    let needed = thresholds.of(what).bytes(total);
    (free < needed).then_some(needed)
}

fn words(what: What) -> (&'static str, &'static str) {
    match what {
        What::Build => (
            "build an image",
            "`harvest gc` frees what nothing uses; `harvest df` shows what takes room",
        ),
        What::Sandbox => (
            "start a sandbox",
            "`harvest gc` frees what nothing uses; remove sandboxes and snapshots you no longer need",
        ),
        What::Snapshot => (
            "take a snapshot",
            "`harvest gc` frees what nothing uses; remove snapshots you no longer need",
        ),
    }
}

impl Engine {
    /// Refuses what takes room when there is too little where it would go.
    pub(crate) fn has_room(&self, what: What) -> Result<(), EngineError> {
        let place: PathBuf = match what {
            What::Build => self.disk.cache().to_owned(),
            What::Sandbox | What::Snapshot => self.disk.root(),
        };
        let (free, total) = free_of_total(&place)?;
        let Some(needed) = lacking(free, total, what, &self.config.thresholds) else {
            return Ok(());
        };
        let (doing, hint) = words(what);
        Err(EngineError::DiskLow { doing, path: place, free, needed, hint })
    }
}

/// Bytes free for us and bytes in all on the disk of a path.
pub(crate) fn free_of_total(path: &Path) -> Result<(u64, u64), EngineError> {
    let stat = statvfs(path).at("look at", path)?;
    Ok((stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_blocks.saturating_mul(stat.f_frsize)))
}

/// Bytes for people.
pub(crate) fn shown(bytes: u64) -> String {
    let (unit, name) =
        if bytes >= 1_000_000_000 { (1_000_000_000, "GB") } else { (1_000_000, "MB") };
    format!("{}.{} {name}", bytes / unit, bytes % unit / (unit / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn refused(free: u64, total: u64) -> Vec<What> {
        let all = [What::Build, What::Sandbox, What::Snapshot];
        all.into_iter()
            .filter(|what| lacking(free, total, *what, &Thresholds::default()).is_some())
            .collect()
    }

    #[test]
    fn builds_are_refused_first_then_sandboxes_then_snapshots() {
        for total in [20 * GIB, 250 * GIB, 10_000 * GIB] {
            let mut seen = vec![];
            for free in (0..=25 * GIB).rev().step_by(64 << 20) {
                let now = refused(free, total);
                assert!(
                    now.starts_with(&seen),
                    "what is refused stays refused: {now:?} after {seen:?}"
                );
                seen = now;
            }
            assert_eq!(seen, [What::Build, What::Sandbox, What::Snapshot], "on a full disk");
        }
        assert_eq!(refused(10 * GIB, 250 * GIB), [What::Build]);
        assert_eq!(refused(4 * GIB, 250 * GIB), [What::Build, What::Sandbox]);
        assert!(refused(25 * GIB, 10_000 * GIB).is_empty(), "a large disk is not kept empty");
    }

    #[test]
    fn without_thresholds_nothing_is_refused_on_a_full_disk() {
        assert_eq!(lacking(0, GIB, What::Build, &Thresholds::NONE), None);
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(shown(1_234_567_890), "1.2 GB");
        assert_eq!(shown(56_700_000), "56.7 MB");
        assert_eq!(shown(0), "0.0 MB");
    }
}
