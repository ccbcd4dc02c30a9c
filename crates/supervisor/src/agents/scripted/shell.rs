//! Runs a command for the scripted agent; can be cancelled.

use std::{
    io,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{ExitStatus, Stdio},
};

use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, kill_process_group},
};
use tokio::{net::unix::pipe, process::Command};

use super::program::{Program, Stop};
use crate::pipes::{discard_output, read_on, read_rest};

// Limit of a tool's output; the rest is counted and dropped.
const MAX_OUTPUT_BYTES: usize = 4 * 1024 * 1024;

/// Runs a command in the working directory; returns whether it succeeded, and its output.
pub(super) async fn run(program: &mut Program, command: &str) -> Result<(bool, String), Stop> {
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
    let shell = if Path::new("/bin/bash").exists() { "bash" } else { "sh" };
    let mut child = Command::new(shell)
        .args(["-c", command])
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(theirs.try_clone()?)
        .stderr(theirs)
        .spawn()?;
    let output = pipe::Receiver::from_owned_fd(ours)?;
    let mut captured = BoundedOutput::default();
    let ended = tokio::select! {
        ended = child.wait() => ended?,
        never = read_on(&output, |bytes| captured.push(bytes)) => never,
        stop = program.cancelled() => {
            if let Some(group) = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
                let _already_gone = kill_process_group(group, Signal::KILL);
            }
            let _reaped = child.wait().await;
            return Err(stop);
        }
    };
    read_rest(&output, |bytes| captured.push(bytes));
    // Processes left running hold the pipe open; closing it would kill them.
    tokio::spawn(discard_output(output));
    Ok((ended.success(), captured.text(ended)))
}

#[derive(Debug, Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
    dropped: usize,
}

impl BoundedOutput {
    fn push(&mut self, bytes: &[u8]) {
        let space = MAX_OUTPUT_BYTES.saturating_sub(self.bytes.len()).min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..space]);
        self.dropped += bytes.len() - space;
    }

    fn text(self, ended: ExitStatus) -> String {
        let mut text = String::from_utf8_lossy(&self.bytes).into_owned();
        if self.dropped > 0 {
            text.push_str(&format!("\n… {} bytes left out …", self.dropped));
        }
        match (ended.code(), ended.signal()) {
            (Some(0), _) => {}
            (Some(code), _) => text.push_str(&format!("\n(exit code {code})")),
            (None, signal) => text.push_str(&format!("\n(signal {})", signal.unwrap_or_default())),
        }
        text
    }
}
