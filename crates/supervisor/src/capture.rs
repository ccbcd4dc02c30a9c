//! Runs an internal command (git, a hook) in the commands' cgroup and keeps only the last lines of
//! its output.

use std::time::Duration;

use harvest_proto::{
    bridge::{Exit, Fault, FaultCode},
    redact,
};
use tokio::net::unix::pipe;

use crate::{
    pipes::{discard_output, pipes, read_rest},
    processes::{Child, ProcessSpec},
    sandbox::Sandbox,
    truncate::Tail,
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
    let system = |error: std::io::Error| {
        Fault::new(FaultCode::System, format!("cannot create a pipe: {error}"))
    };
    let oom_before = sandbox.oom.read();
    let (ours, mut theirs) = pipes(spec.uid, spec.gid, false).map_err(system)?;
    // One pipe for both outputs keeps their lines in order.
    theirs[2] = theirs[1].try_clone().map_err(system)?;
    let mut child = sandbox.processes.start(spec, theirs).await?;
    let mut tail = Tail::default();
    let exit = tokio::select! {
        exit = wait(sandbox, &mut child, timeout, oom_before) => exit,
        never = read_on(&ours.stdout, &mut tail) => never,
    };
    read_rest(&ours.stdout, |bytes| tail.push(bytes));
    // A service started by a hook may hold the pipe open; closing it would kill the service.
    tokio::task::spawn_local(discard_output(ours.stdout));
    Ok(Captured { exit, tail: tail.text() })
}

/// Waits for the exit of a command; kills it after `timeout`.
pub(crate) async fn wait(
    sandbox: &Sandbox,
    child: &mut Child,
    timeout: Duration,
    oom_before: u64,
) -> Exit {
    tokio::select! {
        end = child.wait() => sandbox.exit(end, oom_before),
        () = tokio::time::sleep(timeout) => {
            child.kill().await;
            Exit::Timeout
        }
    }
}

/// Reads until it is cancelled.
pub(crate) async fn read_on<T>(receiver: &pipe::Receiver, tail: &mut Tail) -> T {
    let mut buffer = [0u8; 4096];
    while receiver.readable().await.is_ok() {
        match receiver.try_read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                tail.push(&buffer[..count]);
                // A pipe that never runs empty would starve the other tasks.
                tokio::task::yield_now().await;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    std::future::pending().await
}
