//! The engine's own rows: a sandbox from nothing, and a command in one that lives.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use harvest_engine::{Running, guest::Guest};
use harvest_proto::bridge::{Command, Exit};

use crate::{contest::Contestant, place::Place};

/// Answered with the exit code; the sandbox is removed after the clock has stopped.
pub(crate) const COLD: &str = "harvest cold: create → true → exit";
/// The same, the clock stopped when every process is proven dead, cgroups and name are gone.
pub(crate) const COLD_REMOVED: &str = "harvest cold: create → true → exit → removed";
/// A command in a sandbox that lives, on a connection of its own.
pub(crate) const EXEC: &str = "harvest exec in a live sandbox";
/// The same on a connection that stands already.
pub(crate) const EXEC_AGAIN: &str = "harvest exec, connection kept";

/// Both rows of a cold start, its parts, and both of a live one.
pub(crate) fn contestants(place: &Place) -> Result<Vec<Contestant<'_>>> {
    let live = place.engine.start(&place.spec()?)?;
    let mut kept = Guest::dial(&live.bridge)?;
    let rows = [
        COLD,
        COLD_REMOVED,
        "harvest · of this: create",
        "harvest · of this: command",
        "harvest · of this: removal",
    ];
    Ok(vec![
        Contestant::parts(&rows, || cold(place)),
        Contestant::whole(EXEC, move || run_true(&live)),
        Contestant::whole(EXEC_AGAIN, move || exec(&mut kept, &["true"])),
    ])
}

fn cold(place: &Place) -> Result<Vec<Duration>> {
    let spec = place.spec()?;
    let began = Instant::now();
    let running = place.engine.start(&spec)?;
    let created = began.elapsed();
    run_true(&running)?;
    let exited = began.elapsed();
    place.engine.remove(&spec.id)?;
    let removed = began.elapsed();
    Ok(vec![exited, removed, created, exited - created, removed - exited])
}

fn run_true(running: &Running) -> Result<()> {
    in_sandbox(&running.bridge, &["true"])
}

/// Runs a command in a sandbox; anything but exit code 0 is an error.
pub(crate) fn in_sandbox(bridge: &Path, argv: &[&str]) -> Result<()> {
    exec(&mut Guest::hail(bridge)?, argv)
}

/// Runs a command on a connection.
pub(crate) fn exec(guest: &mut Guest, argv: &[&str]) -> Result<()> {
    let command = Command {
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        ..Command::default()
    };
    let mut said = Vec::new();
    match guest.exec(command, b"", &mut |_, bytes| said.extend_from_slice(bytes))? {
        Exit::Code(0) => Ok(()),
        other => bail!("{argv:?} ended with {other:?}: {}", String::from_utf8_lossy(&said)),
    }
}
