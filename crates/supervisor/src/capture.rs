//! Runs an internal command (git, a hook) in the commands' cgroup and keeps only the last lines of
//! its output.

use std::{future::pending, time::Duration};

use crate::{
    exec,
    pipes::{discard_output, pipes, read_on, read_rest},
    processes::ProcessSpec,
    sandbox::Sandbox,
    truncate::Tail,
};
use harvest_proto::{
    bridge::{Exit, Fault},
    redact,
};

/// How a captured command ended.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) exit: Exit,
    /// The last lines of both outputs.
    pub(crate) tail: String,
}

impl Captured {
    /// The last lines if the command succeeded, otherwise an error with them.
    pub(crate) fn ok(self) -> Result<String, String> {
        match self.exit {
            Exit::Code(0) => Ok(self.tail),
            exit => {
                let tail = redact::redact(&self.tail);
                Err(format!("{tail}\n{}", describe(exit)).trim_start().to_owned())
            }
        }
    }
}

/// Describes an exit; to be preceded by a subject.
pub(crate) fn describe(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::Signal(signal) => format!("was killed by signal {signal}"),
        Exit::Oom => "was killed by the memory limit".to_owned(),
        Exit::Timeout => "was killed by the time limit".to_owned(),
        Exit::Killed => "was killed on request".to_owned(),
    }
}

/// Runs a command with a timeout.
pub(crate) async fn run(
    sandbox: &Sandbox,
    spec: ProcessSpec,
    timeout: Duration,
) -> Result<Captured, Fault> {
    let system = |error: std::io::Error| Fault::system(format!("cannot create a pipe: {error}"));
    let oom_before = sandbox.oom.read();
    let (ours, mut theirs) = pipes(spec.uid, spec.gid, false).map_err(system)?;
    // One pipe for both outputs keeps their lines in order.
    theirs[2] = theirs[1].try_clone().map_err(system)?;
    let mut child = sandbox.processes.start(spec, theirs).await?;
    let mut tail = Tail::default();
    let exit = tokio::select! {
        exit = exec::supervise(sandbox, &mut child, Some(timeout), pending(), oom_before) => exit,
        never = read_on(&ours.stdout, |bytes| tail.push(bytes)) => never,
    };
    read_rest(&ours.stdout, |bytes| tail.push(bytes));
    // A service started by a hook may hold the pipe open; closing it would kill the service.
    tokio::task::spawn_local(discard_output(ours.stdout));
    Ok(Captured { exit, tail: tail.text() })
}
