//! What a sandbox uses, read from its cgroups.

use std::{fs, path::Path};

/// The CPU time of a sandbox since its start, and its present memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeUsage {
    /// CPU time in microseconds.
    pub cpu_micros: u64,
    /// Without the contents of files that the kernel can drop.
    pub memory_bytes: u64,
}

pub(super) fn v2(folder: &Path) -> Option<ComputeUsage> {
    let read = |file| fs::read_to_string(folder.join(file)).ok();
    let cpu_micros = value(&read("cpu.stat")?, "usage_usec")?;
    let memory_bytes = memory(&read("memory.current")?, &read("memory.stat")?, "inactive_file")?;
    Some(ComputeUsage { cpu_micros, memory_bytes })
}

/// The files of a v1 cgroup count the cgroups below it, too.
pub(super) fn v1(accounting: &Path, memory_folder: &Path) -> Option<ComputeUsage> {
    let nanos: u64 =
        fs::read_to_string(accounting.join("cpuacct.usage")).ok()?.trim().parse().ok()?;
    let read = |file| fs::read_to_string(memory_folder.join(file)).ok();
    let (used, stat) = (read("memory.usage_in_bytes")?, read("memory.stat")?);
    let memory_bytes = memory(&used, &stat, "total_inactive_file")?;
    Some(ComputeUsage { cpu_micros: nanos / 1000, memory_bytes })
}

fn memory(used: &str, stat: &str, droppable: &str) -> Option<u64> {
    let used: u64 = used.trim().parse().ok()?;
    Some(used.saturating_sub(value(stat, droppable).unwrap_or(0)))
}

fn value(text: &str, name: &str) -> Option<u64> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.find(|(key, _)| *key == name)?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn usage_is_read_from_both_versions() {
        let files = [
            ("cpu.stat", "usage_usec 12345\nuser_usec 9\n"),
            ("memory.current", "5000\n"),
            ("memory.stat", "anon 1\ninactive_file 1000\n"),
        ];
        let expected = ComputeUsage { cpu_micros: 12345, memory_bytes: 4000 };
        assert_eq!(v2(folder(&files).path()), Some(expected));
        let files = [
            ("cpuacct.usage", "12345678\n"),
            ("memory.usage_in_bytes", "5000\n"),
            ("memory.stat", "inactive_file 3\ntotal_inactive_file 1000\n"),
        ];
        let both = folder(&files);
        assert_eq!(v1(both.path(), both.path()), Some(expected));
    }

    #[test]
    fn uncounted_usage_is_absent_not_zero() {
        let empty = folder(&[]);
        assert_eq!((v2(empty.path()), v1(empty.path(), empty.path())), (None, None));
    }
}
