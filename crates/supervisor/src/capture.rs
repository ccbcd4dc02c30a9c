//! Runs a command of the supervisor's own (git, a hook) in the commands' cgroup, and keeps its last
//! lines. The output goes nowhere else.

use std::time::Duration;

use harvest_proto::{
    bridge::{Exit, Fault, FaultCode},
    redact,
};
use tokio::net::unix::pipe;

use crate::{
    cut::Tail,
    exec::{pipes, read_rest, throw_away},
    processes::Order,
    supervisor::Supervisor,
};

/// How a captured command ended.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) exit: Exit,
    /// The last lines of both outputs.
    pub(crate) tail: String,
}

impl Captured {
    /// Its last line, when it ended well.
    pub(crate) fn ok(self) -> Result<String, String> {
        match self.exit {
            Exit::Code(0) => Ok(self.tail),
            exit => {
                let tail = redact::cover(&self.tail);
                Err(format!("{tail}\n{}", describe(exit)).trim_start().to_owned())
            }
        }
    }
}

/// An exit in words, after the name of what ended.
pub(crate) fn describe(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::Signal(signal) => format!("was killed by signal {signal}"),
        Exit::Oom => "was killed by the memory limit".to_owned(),
        Exit::Timeout => "was killed by the time limit".to_owned(),
        Exit::Killed => "was killed on request".to_owned(),
    }
}

/// Runs a command to its end, for at most `limit`.
pub(crate) async fn run(
    supervisor: &Supervisor,
    order: Order,
    limit: Duration,
) -> Result<Captured, Fault> {
    let system = |error: std::io::Error| {
        Fault::new(FaultCode::System, format!("cannot make a pipe: {error}"))
    };
    let oom_before = supervisor.oom.read();
    let (ours, mut theirs) = pipes(&order, false).map_err(system)?;
    // One pipe for both outputs keeps their lines in order.
    theirs[2] = theirs[1].try_clone().map_err(system)?;
    let mut child = supervisor.processes.start(order, theirs).await?;
    let mut tail = Tail::default();
    let exit = {
        let wait = async {
            tokio::select! {
                end = child.wait() => supervisor.exit(end, oom_before),
                () = tokio::time::sleep(limit) => {
                    child.kill().await;
                    Exit::Timeout
                }
            }
        };
        tokio::select! {
            exit = wait => exit,
            never = read_on(&ours.stdout, &mut tail) => never,
        }
    };
    read_rest(&ours.stdout, |bytes| tail.push(bytes));
    // A service that a hook started keeps its output open; a closed pipe would kill it.
    tokio::task::spawn_local(throw_away(ours.stdout));
    Ok(Captured { exit, tail: tail.text() })
}

async fn read_on(receiver: &pipe::Receiver, tail: &mut Tail) -> Exit {
    let mut buffer = [0u8; 4096];
    while receiver.readable().await.is_ok() {
        match receiver.try_read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                tail.push(&buffer[..count]);
                // A pipe that is always full never makes us wait: everybody else would.
                tokio::task::yield_now().await;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    std::future::pending().await
}
