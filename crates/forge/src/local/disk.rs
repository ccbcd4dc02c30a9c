//! Whether the disk has room for a push. Snapshots stop at the same free space, so that pushes do
//! not take what the rest of Harvest leaves free.

use std::path::Path;

const MIN_FREE_BYTES: u64 = 128 << 20;
const MAX_FREE_BYTES: u64 = 2 << 30;

/// True as well when the disk does not say how full it is.
pub(super) fn has_room(folder: &Path) -> bool {
    let Ok(stat) = rustix::fs::statvfs(folder) else { return true };
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    leaves_reserve(bytes(stat.f_bavail), bytes(stat.f_blocks))
}

/// A hundredth of the disk stays free, within bounds.
fn leaves_reserve(free: u64, total: u64) -> bool {
    free >= (total / 100).clamp(MIN_FREE_BYTES, MAX_FREE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn almost_full_disk_takes_no_push() {
        const GIB: u64 = 1 << 30;
        for (free, total, room) in [
            (0, GIB, false),
            (100 << 20, GIB, false),
            (200 << 20, GIB, true),
            (GIB, 200 * GIB, false),
            (3 * GIB, 10_000 * GIB, true),
        ] {
            assert_eq!(leaves_reserve(free, total), room, "{free} of {total}");
        }
    }
}
