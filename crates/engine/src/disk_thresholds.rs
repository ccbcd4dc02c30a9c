//! Free-space thresholds: as a disk fills up, builds are refused first, then new sandboxes, then
//! snapshots. Running sandboxes are never checked here; their writes fail with ENOSPC.

use std::path::{Path, PathBuf};

use rustix::fs::statvfs;

use crate::{Engine, EngineError, error::AtPath};

/// An operation that needs free disk space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskOperation {
    Build,
    Sandbox,
    Snapshot,
}

/// How much of a disk must stay free: a share of its size, within bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threshold {
    /// The share, in thousandths of the disk's size.
    pub permille: u64,
    /// The lower bound, for small disks.
    pub at_least_bytes: u64,
    /// The upper bound, for large disks.
    pub at_most_bytes: u64,
}

impl Threshold {
    const NONE: Self = Self { permille: 0, at_least_bytes: 0, at_most_bytes: 0 };

    fn bytes(self, total: u64) -> u64 {
        let share = total / 1000 * self.permille;
        share.max(self.at_least_bytes).min(self.at_most_bytes)
    }
}

/// The free space below which each operation is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Builds of images.
    pub build: Threshold,
    /// Starts of new sandboxes.
    pub sandbox: Threshold,
    /// Snapshots of running sandboxes.
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
    /// Refuses nothing. For tests, which may run on a nearly full disk.
    pub const NONE: Self =
        Self { build: Threshold::NONE, sandbox: Threshold::NONE, snapshot: Threshold::NONE };

    fn of(&self, operation: DiskOperation) -> Threshold {
        match operation {
            DiskOperation::Build => self.build,
            DiskOperation::Sandbox => self.sandbox,
            DiskOperation::Snapshot => self.snapshot,
        }
    }
}

/// The bytes that must be free for the operation, if fewer are.
fn missing_space(
    free: u64,
    total: u64,
    operation: DiskOperation,
    thresholds: &Thresholds,
) -> Option<u64> {
    let needed = thresholds.of(operation).bytes(total);
    (free < needed).then_some(needed)
}

/// The operation as a verb phrase, and a hint for the user.
fn describe(operation: DiskOperation) -> (&'static str, &'static str) {
    match operation {
        DiskOperation::Build => (
            "build an image",
            "run `harvest gc` to remove unused data; `harvest df` shows what uses space",
        ),
        DiskOperation::Sandbox => (
            "start a sandbox",
            "run `harvest gc` to remove unused data, or remove sandboxes and snapshots you no longer need",
        ),
        DiskOperation::Snapshot => (
            "take a snapshot",
            "run `harvest gc` to remove unused data, or remove snapshots you no longer need",
        ),
    }
}

impl Engine {
    /// Fails when the disk the operation writes to has less free space than its threshold.
    pub(crate) fn check_free_space(&self, operation: DiskOperation) -> Result<(), EngineError> {
        let path: PathBuf = match operation {
            DiskOperation::Build => self.disk.cache().to_owned(),
            DiskOperation::Sandbox | DiskOperation::Snapshot => self.disk.home.root(),
        };
        let (free, total) = free_and_total_bytes(&path)?;
        let Some(needed) = missing_space(free, total, operation, &self.config.thresholds) else {
            return Ok(());
        };
        let (doing, hint) = describe(operation);
        Err(EngineError::DiskLow { doing, path, free, needed, hint })
    }
}

/// Bytes available to this process, and the size of the file system, where `path` is.
pub(crate) fn free_and_total_bytes(path: &Path) -> Result<(u64, u64), EngineError> {
    let stat = statvfs(path).at("access", path)?;
    Ok((stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_blocks.saturating_mul(stat.f_frsize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn refused(free: u64, total: u64) -> Vec<DiskOperation> {
        let thresholds = Thresholds::default();
        [DiskOperation::Build, DiskOperation::Sandbox, DiskOperation::Snapshot]
            .into_iter()
            .filter(|operation| missing_space(free, total, *operation, &thresholds).is_some())
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
                    "a refused operation stays refused: {now:?} after {seen:?}"
                );
                seen = now;
            }
            assert_eq!(
                seen,
                [DiskOperation::Build, DiskOperation::Sandbox, DiskOperation::Snapshot],
                "on a full disk"
            );
        }
        assert_eq!(refused(10 * GIB, 250 * GIB), [DiskOperation::Build]);
        assert_eq!(refused(4 * GIB, 250 * GIB), [DiskOperation::Build, DiskOperation::Sandbox]);
        assert!(refused(25 * GIB, 10_000 * GIB).is_empty(), "a large disk is not kept empty");
    }

    #[test]
    fn no_thresholds_refuse_nothing_on_a_full_disk() {
        assert_eq!(missing_space(0, GIB, DiskOperation::Build, &Thresholds::NONE), None);
    }
}
