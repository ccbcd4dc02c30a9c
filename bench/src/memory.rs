//! Private memory of the platform's processes in a sandbox after a hundred commands.

use std::fs;

use anyhow::{Context, Result};
use harvest_engine::supervisor_client::SupervisorClient;
use serde::Serialize;

use crate::{
    harvest::{exec, in_sandbox},
    workspace::Workspace,
};

/// How many commands run before the measurement.
pub(crate) const EXECS: usize = 100;
/// The target for the private memory of pid 1, in KiB.
pub(crate) const TARGET_KIB: u64 = 1536;

/// Private memory of the supervisor and the processes between it and commands.
#[derive(Debug, Serialize)]
pub(crate) struct Memory {
    pub(crate) execs: usize,
    pub(crate) processes: Vec<Process>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Process {
    pub(crate) role: String,
    pub(crate) private_kib: u64,
}

impl Memory {
    pub(crate) fn pid_1_kib(&self) -> u64 {
        self.processes.first().map_or(0, |process| process.private_kib)
    }

    pub(crate) fn all_kib(&self) -> u64 {
        self.processes.iter().map(|process| process.private_kib).sum()
    }
}

/// Runs commands in a new sandbox, half of them on one connection, then measures.
pub(crate) fn after_execs(workspace: &Workspace, execs: usize) -> Result<Memory> {
    let running = workspace.engine.start(&workspace.spec()?)?;
    let mut connection = SupervisorClient::dial(&running.bridge)?;
    for _ in 0..execs / 2 {
        exec(&mut connection, &["true"])?;
        in_sandbox(&running.bridge, &["true"])?;
    }
    let mut processes = Vec::new();
    for pid in in_namespace_of(running.pid) {
        let role = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let role = String::from_utf8_lossy(&role).split('\0').nth(1).unwrap_or_default().to_owned();
        let role = if role.is_empty() { "pid 1".to_owned() } else { role };
        processes.push(Process { role, private_kib: private_kib(pid)? });
    }
    workspace.engine.remove(&running.id)?;
    Ok(Memory { execs, processes })
}

/// All processes in the pid namespace of this process, itself first.
fn in_namespace_of(pid: u32) -> Vec<u32> {
    let link = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let wanted = link(pid);
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut found: Vec<u32> = all
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|one| *one != pid && link(*one) == wanted)
        .collect();
    found.insert(0, pid);
    found
}

fn private_kib(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .with_context(|| format!("cannot read the memory usage of process {pid}"))?;
    let kib =
        |line: &str| line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok());
    Ok(text.lines().filter(|line| line.starts_with("Private_")).filter_map(kib).sum())
}
