//! The engine's rows: cold start of a sandbox, and a command in a running one.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use harvest_engine::{Running, supervisor_client::SupervisorClient};
use harvest_proto::bridge::{Command, Exit};

use crate::{runner::Benchmark, workspace::Workspace};

/// Until the exit code; the sandbox is removed afterwards, unmeasured.
pub(crate) const COLD: &str = "harvest cold: create → true → exit";
/// Until every process is dead, and the cgroups and the name are gone.
pub(crate) const COLD_REMOVED: &str = "harvest cold: create → true → exit → removed";
/// A command in a running sandbox, on a new connection.
pub(crate) const EXEC: &str = "harvest exec in a live sandbox";
/// A command in a running sandbox, on an existing connection.
pub(crate) const EXEC_REUSED: &str = "harvest exec, connection reused";

pub(crate) fn benchmarks(workspace: &Workspace) -> Result<Vec<Benchmark<'_>>> {
    let live = workspace.engine.start(&workspace.spec()?)?;
    let mut connection = SupervisorClient::dial(&live.bridge)?;
    let rows = [
        COLD,
        COLD_REMOVED,
        "harvest · of this: create",
        "harvest · of this: command",
        "harvest · of this: removal",
    ];
    Ok(vec![
        Benchmark::parts(&rows, || cold(workspace)),
        Benchmark::whole(EXEC, move || run_true(&live)),
        Benchmark::whole(EXEC_REUSED, move || exec(&mut connection, &["true"])),
    ])
}

fn cold(workspace: &Workspace) -> Result<Vec<Duration>> {
    let spec = workspace.spec()?;
    let began = Instant::now();
    let running = workspace.engine.start(&spec)?;
    let created = began.elapsed();
    run_true(&running)?;
    let exited = began.elapsed();
    workspace.engine.remove(&spec.id)?;
    let removed = began.elapsed();
    Ok(vec![exited, removed, created, exited - created, removed - exited])
}

fn run_true(running: &Running) -> Result<()> {
    in_sandbox(&running.bridge, &["true"])
}

/// Runs a command in a sandbox; anything but exit code 0 is an error.
pub(crate) fn in_sandbox(bridge: &Path, argv: &[&str]) -> Result<()> {
    exec(&mut SupervisorClient::dial_pipelined(bridge)?, argv)
}

/// Runs a command on an existing connection.
pub(crate) fn exec(client: &mut SupervisorClient, argv: &[&str]) -> Result<()> {
    let command = Command {
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        ..Command::default()
    };
    let mut output = Vec::new();
    match client.exec(command, b"", &mut |_, bytes| output.extend_from_slice(bytes))? {
        Exit::Code(0) => Ok(()),
        other => bail!("{argv:?} ended with {other:?}: {}", String::from_utf8_lossy(&output)),
    }
}
