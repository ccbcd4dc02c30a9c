//! How much memory the pool may use: a quarter of the machine's, and none that is short.

use std::path::Path;

/// What a sandbox whose use is unknown counts for: an agent that waits uses about half of it.
pub(super) const MEMBER_BYTES: u64 = 512 << 20;

/// The memory of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostMemory {
    pub(super) total: u64,
    pub(super) available: u64,
}

impl HostMemory {
    /// `None` when the file cannot be read: then there is no limit.
    pub(super) fn read(meminfo: &Path) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(meminfo).ok()?)
    }

    fn parse(meminfo: &str) -> Option<Self> {
        let bytes = |name: &str| -> Option<u64> {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kib.saturating_mul(1024))
        };
        Some(Self { total: bytes("MemTotal:")?, available: bytes("MemAvailable:")? })
    }

    /// Sandboxes of the pool must end.
    pub(super) fn is_short(self) -> bool {
        self.available < self.total / 10
    }

    /// Whether the pool, which uses this much, may have one more sandbox.
    pub(super) fn has_room(self, used: u64) -> bool {
        let left = self.available.saturating_sub(MEMBER_BYTES);
        used.saturating_add(MEMBER_BYTES) <= self.total / 4 && left >= self.total / 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(total_gib: u64, available_mib: u64) -> HostMemory {
        let text = format!(
            "MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable:   {} kB\n",
            total_gib << 20,
            available_mib << 10
        );
        HostMemory::parse(&text).unwrap()
    }

    #[test]
    fn pool_uses_at_most_a_quarter() {
        let host = memory(8, 6000);
        assert!(host.has_room(0) && host.has_room(3 * MEMBER_BYTES));
        assert!(!host.has_room(3 * MEMBER_BYTES + 1));
        assert_eq!(HostMemory::parse("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn short_memory_ends_the_pool() {
        assert!(!memory(10, 1100).is_short() && memory(10, 1000).is_short());
        assert!(!memory(10, 1100).has_room(0), "one more would make it short");
    }
}
