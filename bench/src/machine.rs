//! The machine of a run: kernel, processors, versions of the peers, and the load before and after.

use std::{fs, process::Command};

use serde::Serialize;

/// The computer the bench runs on, and its programs.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    kernel: String,
    processor: String,
    cores: usize,
    memory_mib: u64,
    cgroups: &'static str,
    versions: Vec<String>,
    pub(crate) busy_before: Load,
    pub(crate) busy_after: Load,
}

/// How busy the machine is.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Load {
    /// Percent of the last 10 and 60 seconds in which some process waited for a CPU.
    pressure_10s: f64,
    pressure_60s: f64,
    load_1m: f64,
}

impl Machine {
    /// Detects the machine. `hidden`: an empty cgroup2 mount was hidden from the bench.
    pub(crate) fn detect(hidden: bool) -> Self {
        let versions = [("bwrap", "--version"), ("crun", "--version"), ("runc", "--version")];
        let more = [("podman", "--version"), ("docker", "--version"), ("btrfs", "--version")];
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: field(&read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: field(&read("/proc/meminfo"), "MemTotal")
                .split(' ')
                .next()
                .and_then(|kib| kib.parse::<u64>().ok())
                .map_or(0, |kib| kib / 1024),
            cgroups: cgroups(hidden),
            versions: versions
                .iter()
                .chain(&more)
                .filter_map(|(name, flag)| version(name, flag))
                .collect(),
            busy_before: Load::now(),
            busy_after: Load::default(),
        }
    }

    pub(crate) fn line(&self) -> String {
        format!(
            "Linux {} · {} cores, {} · {} MiB · {} · {}",
            self.kernel,
            self.cores,
            self.processor,
            self.memory_mib,
            self.cgroups,
            self.versions.join(", ")
        )
    }
}

impl Load {
    pub(crate) fn now() -> Self {
        let pressure = read("/proc/pressure/cpu");
        let percent = |name: &str| {
            let words = pressure.lines().next().unwrap_or_default().split(' ');
            words.filter_map(|word| word.strip_prefix(name)).find_map(|value| value.parse().ok())
        };
        Self {
            pressure_10s: percent("avg10=").unwrap_or(0.0),
            pressure_60s: percent("avg60=").unwrap_or(0.0),
            load_1m: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|load| load.parse().ok())
                .unwrap_or(0.0),
        }
    }

    pub(crate) fn line(&self) -> String {
        format!(
            "CPU pressure {:.1} % (10 s), {:.1} % (60 s), load {:.1}",
            self.pressure_10s, self.pressure_60s, self.load_1m
        )
    }
}

fn cgroups(hidden: bool) -> &'static str {
    let mounts = read("/proc/self/mounts");
    let has = |kind: &str| mounts.lines().any(|line| line.split(' ').nth(2) == Some(kind));
    match (has("cgroup"), hidden) {
        (true, true) => "cgroup v1 (a cgroup2 mount without controllers is hidden from every row)",
        (true, false) => "cgroup v1",
        (false, _) => "cgroup v2",
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn field(text: &str, name: &str) -> String {
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.split_once(':')).map_or("?", |(_, value)| value.trim()).to_owned()
}

fn version(program: &str, flag: &str) -> Option<String> {
    let output = Command::new(program).arg(flag).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}
