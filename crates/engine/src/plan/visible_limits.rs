//! The files that show programs inside their limits instead of the host's size. Pure.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{cgroup::Hierarchy, spec::Limits};

/// The CPUs that a sandbox's programs count and run on: as many as its limit fills, rounded up.
/// `seed` spreads sandboxes over the host. A default rather than a limit: programs may change their
/// own affinity, and the CPU time is limited by the cgroup.
pub(super) fn visible_cpus(host: &[u32], limits: &Limits, seed: &str) -> Vec<u32> {
    let wanted = limits.cpu_millis_per_second.div_ceil(1000).max(1) as usize;
    if wanted >= host.len() {
        return host.to_vec();
    }
    let hash =
        seed.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let first = hash as usize % host.len();
    let mut cpus: Vec<u32> = host.iter().cycle().skip(first).take(wanted).copied().collect();
    cpus.sort_unstable();
    cpus
}

/// The host's `/proc/cpuinfo` without the processors that are not in `cpus`.
pub(super) fn cpuinfo(host: &str, cpus: &[u32]) -> String {
    let number = |block: &str| -> Option<u32> {
        block.lines().next()?.strip_prefix("processor")?.split(':').nth(1)?.trim().parse().ok()
    };
    // Other architectures have blocks that describe no single processor.
    let kept = |block: &&str| number(block).is_none_or(|number| cpus.contains(&number));
    host.split_inclusive("\n\n").filter(kept).collect()
}

/// The files of `/sys`. Where the cgroups are v1, their limits are repeated in the layout of v2.
pub(super) fn sys_files(
    limits: &Limits,
    cgroups: &Hierarchy,
    cpus: &[u32],
) -> BTreeMap<PathBuf, String> {
    let mut files: Vec<(String, String)> = ["online", "possible", "present"]
        .map(|name| (format!("devices/system/cpu/{name}"), ranges(cpus)))
        .into();
    if matches!(cgroups, Hierarchy::V1 { .. }) {
        let cpu = u64::from(limits.cpu_millis_per_second) * 100;
        files.extend(
            [
                ("cgroup.controllers", "cpu memory pids".to_owned()),
                ("cpu.max", format!("{cpu} 100000")),
                ("memory.high", "max".to_owned()),
                ("memory.max", limits.memory_bytes.to_string()),
                ("memory.swap.max", "0".to_owned()),
                ("pids.max", limits.pids.to_string()),
            ]
            .map(|(name, value)| (format!("fs/cgroup/{name}"), value)),
        );
    }
    files.into_iter().map(|(path, value)| (path.into(), format!("{value}\n"))).collect()
}

/// Numbers in the kernel's list format, such as `0-2,5`.
fn ranges(sorted: &[u32]) -> String {
    let runs = sorted.chunk_by(|left, right| left + 1 == *right);
    let text = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        run => run.iter().map(u32::to_string).collect(),
    });
    text.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(cpu_millis_per_second: u32) -> Limits {
        Limits { cpu_millis_per_second, ..Limits::default() }
    }

    #[test]
    fn cpu_count_is_the_limit_rounded_up() {
        let host: Vec<u32> = (0..8).collect();
        for (millis, count) in [(1, 1), (1000, 1), (1500, 2), (7001, 8), (64_000, 8)] {
            for seed in ["sbx_a", "sbx_b", "sbx_zzz"] {
                let cpus = visible_cpus(&host, &limits(millis), seed);
                assert_eq!(cpus.len(), count, "{millis}");
                assert!(cpus.is_sorted() && cpus.iter().all(|cpu| host.contains(cpu)));
            }
        }
        assert_eq!(visible_cpus(&[], &limits(1), ""), [0u32; 0]);
    }

    #[test]
    fn sandboxes_are_spread_over_the_cpus() {
        let host: Vec<u32> = (0..4).collect();
        let first = |number: u32| visible_cpus(&host, &limits(1000), &format!("sbx_{number}"))[0];
        let used: std::collections::BTreeSet<u32> = (0..16).map(first).collect();
        assert_eq!(used.len(), 4);
    }

    #[test]
    fn cpuinfo_lists_visible_processors_only() {
        let host =
            "processor\t: 0\nflags\t: a\n\nprocessor\t: 1\n\nprocessor\t: 12\n\nHardware\t: x\n";
        assert_eq!(cpuinfo(host, &[12]), "processor\t: 12\n\nHardware\t: x\n");
        assert_eq!(cpuinfo(host, &[0, 1, 12]), host);
    }

    #[test]
    fn cpu_lists_are_written_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[]), "");
    }
}
