//! The `/proc/meminfo` of a sandbox: the engine creates it, the supervisor keeps it current. Pure.

/// The memory of a sandbox in bytes, as its cgroup counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// The limit.
    pub total: u64,
    /// Everything that counts against the limit.
    pub used: u64,
    /// Memory of processes.
    pub anonymous: u64,
    /// Contents of files, shared memory included.
    pub cached: u64,
    /// Shared memory and tmpfs: the part of `cached` that cannot be dropped.
    pub shared: u64,
    /// Kernel memory that can be dropped.
    pub kernel_reclaimable: u64,
}

impl MemoryUsage {
    /// Takes the current usage from a cgroup's files: `memory.current` and `memory.stat` of v2, or
    /// `memory.usage_in_bytes` and `memory.stat` of v1.
    #[must_use]
    pub fn parse(total: u64, used: &str, stat: &str) -> Self {
        let values: Vec<(&str, u64)> = stat
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(name, value)| Some((name, value.trim().parse().ok()?)))
            .collect();
        // The names of v1 first: v1 has `shmem` too, but without the cgroups below.
        let value = |names: &[&str]| {
            let found = names.iter().find_map(|name| values.iter().find(|(key, _)| key == name));
            found.map_or(0, |(_, value)| *value)
        };
        Self {
            total,
            used: used.trim().parse().unwrap_or(0),
            anonymous: value(&["total_rss", "anon"]),
            cached: value(&["total_cache", "file"]),
            shared: value(&["total_shmem", "shmem"]),
            kernel_reclaimable: value(&["slab_reclaimable"]),
        }
    }

    /// The text of `/proc/meminfo` on a machine with this memory and no swap. Its length does not
    /// depend on the usage, so a reader never sees the rest of an older text.
    #[must_use]
    pub fn meminfo(&self) -> String {
        let used = self.used.min(self.total);
        let free = self.total - used;
        let files = self.cached.saturating_sub(self.shared);
        let reclaimable = files.saturating_add(self.kernel_reclaimable).min(used);
        // The kernel's columns; a machine with more than 95 GiB needs a wider one.
        let width = (self.total / 1024).to_string().len().max(8);
        [
            ("MemTotal", self.total),
            ("MemFree", free),
            ("MemAvailable", free + reclaimable),
            ("Buffers", 0),
            ("Cached", self.cached.min(used)),
            ("SwapCached", 0),
            ("Active", self.anonymous.min(used)),
            ("Inactive", files.min(used)),
            ("SwapTotal", 0),
            ("SwapFree", 0),
            ("Dirty", 0),
            ("Writeback", 0),
            ("AnonPages", self.anonymous.min(used)),
            ("Mapped", 0),
            ("Shmem", self.shared.min(used)),
            ("Slab", self.kernel_reclaimable.min(used)),
            ("SReclaimable", self.kernel_reclaimable.min(used)),
            ("SUnreclaim", 0),
            ("CommitLimit", self.total),
            ("Committed_AS", self.anonymous.min(used)),
        ]
        .map(|(name, bytes)| format!("{:<16}{:>width$} kB\n", format!("{name}:"), bytes / 1024))
        .concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn kib(text: &str, name: &str) -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap()
    }

    #[test]
    fn meminfo_has_the_kernels_columns() {
        let text = MemoryUsage { total: 4 << 30, ..MemoryUsage::default() }.meminfo();
        assert!(text.starts_with("MemTotal:        4194304 kB\n"), "{text}");
        assert!(text.contains("\nSwapTotal:             0 kB\n"), "{text}");
        assert_eq!(kib(&text, "MemAvailable"), 4 << 20);
    }

    #[test]
    fn length_does_not_depend_on_usage() {
        for total in [1 << 30, 200 << 30] {
            let empty = MemoryUsage { total, ..MemoryUsage::default() };
            let full = MemoryUsage { used: total, ..empty };
            assert_eq!(empty.meminfo().len(), full.meminfo().len());
        }
    }

    #[test]
    fn shared_memory_is_not_available_memory() {
        let v1 =
            "rss 1\nshmem 2\ntotal_cache 52428800\ntotal_rss 209715200\ntotal_shmem 20971520\n";
        let v2 = "anon 209715200\nfile 52428800\nkernel 4096\nshmem 20971520\nslab_reclaimable 0\n";
        for stat in [v1, v2] {
            let usage = MemoryUsage::parse(1 << 30, "283115520\n", stat);
            assert_eq!((usage.anonymous, usage.shared), (200 * MIB, 20 * MIB), "{stat}");
            let text = usage.meminfo();
            assert_eq!(kib(&text, "MemFree"), (1024 - 270) << 10);
            assert_eq!(kib(&text, "MemAvailable"), (1024 - 270 + 30) << 10);
            assert_eq!(kib(&text, "Cached"), 50 << 10);
        }
    }

    // Counters lag behind each other, so their sums may exceed the limit for a moment.
    #[test]
    fn no_value_exceeds_the_total() {
        for used in [0, 1, MIB, u64::MAX] {
            let usage = MemoryUsage { used, total: MIB, ..MemoryUsage::default() };
            let huge = MemoryUsage {
                anonymous: u64::MAX,
                cached: u64::MAX / 2,
                kernel_reclaimable: u64::MAX / 2,
                ..usage
            };
            for text in [usage.meminfo(), huge.meminfo()] {
                assert_eq!(text.len(), usage.meminfo().len());
                for line in text.lines() {
                    let value = line.split_whitespace().nth(1).unwrap();
                    assert!(value.parse::<u64>().unwrap() <= 1024, "{text}");
                }
            }
        }
    }
}
