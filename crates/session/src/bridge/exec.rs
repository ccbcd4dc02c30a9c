//! Commands run over the bridge.

use std::{collections::HashMap, sync::Arc};

use harvest_proto::bridge::{
    Command, Exit, Frame, INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, RequestId, StreamId, ToSupervisor,
};
use tokio::sync::{Semaphore, mpsc};

use super::{Bridge, BridgeError, StreamKind};

// Credit is returned in portions of a quarter of the window, not for every byte.
const GRANT_BYTES: u32 = INITIAL_CREDIT_BYTES / 4;

/// Output or exit of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecOutput {
    /// Bytes of stdout, or of a file.
    Stdout {
        stream: StreamId,
        bytes: Vec<u8>,
    },
    Stderr {
        stream: StreamId,
        bytes: Vec<u8>,
    },
    /// The end of a file.
    End,
    /// Nothing follows.
    Exited {
        exit: Exit,
        millis: u64,
    },
}

/// A running command. Unless it is detached, dropping this kills it.
#[derive(Debug)]
pub struct Exec {
    pub(super) bridge: Bridge,
    pub(super) id: RequestId,
    pub(super) streams: Vec<StreamId>,
    pub(super) stdin: Option<StreamId>,
    pub(super) output: mpsc::UnboundedReceiver<ExecOutput>,
    pub(super) read: HashMap<StreamId, u32>,
    pub(super) ended: bool,
    /// It keeps running without a connection.
    pub(super) detached: bool,
}

/// The result of a command that ran to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOutput {
    pub exit: Exit,
    pub millis: u64,
    /// The last bytes of stdout and stderr together.
    pub tail: Vec<u8>,
}

impl CommandOutput {
    #[must_use]
    pub fn ok(&self) -> bool {
        self.exit == Exit::Code(0)
    }

    #[must_use]
    pub fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).trim_end().to_owned()
    }
}

impl Bridge {
    /// Starts a command; with `stdin`, the second value writes to it while it runs.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn exec_piped(
        &self,
        mut command: Command,
        stdin: bool,
    ) -> Result<(Exec, Option<ExecInput>), BridgeError> {
        let (to, output) = mpsc::unbounded_channel();
        command.stdout = self.new_stream();
        command.stderr = self.new_stream();
        command.stdin = stdin.then(|| self.new_stream());
        self.receive(command.stdout, StreamKind::Stdout, to.clone());
        self.receive(command.stderr, StreamKind::Stderr, to.clone());
        let (streams, stdin) = (vec![command.stdout, command.stderr], command.stdin);
        let detached = command.detached;
        let credit = stdin.map(|stream| (stream, self.open_outgoing(stream)));
        let posted = self.post(|id| {
            // Before the request is sent: a short command may exit before this thread runs again.
            self.table().execs.insert(id, to);
            ToSupervisor::Exec { id, command: Box::new(command) }
        })?;
        let id = posted.id;
        let mut exec = self.output_of(id, streams, output);
        (exec.stdin, exec.detached) = (stdin, detached);
        match posted.reply().await {
            Ok(_) => {
                let bridge = self.clone();
                Ok((
                    exec,
                    credit.map(|(stream, credit)| ExecInput { bridge, exec: id, stream, credit }),
                ))
            }
            Err(error) => {
                exec.ended = !matches!(error, BridgeError::Lost);
                Err(error)
            }
        }
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// When it cannot be started, or the connection is lost before it ends.
    pub async fn run_command(&self, command: Command) -> Result<CommandOutput, BridgeError> {
        let (mut exec, _) = self.exec_piped(command, false).await?;
        let mut tail = Vec::new();
        while let Some(output) = exec.next().await {
            match output {
                ExecOutput::Stdout { bytes, .. } | ExecOutput::Stderr { bytes, .. } => {
                    append_tail(&mut tail, &bytes);
                }
                ExecOutput::End => {}
                ExecOutput::Exited { exit, millis } => {
                    return Ok(CommandOutput { exit, millis, tail });
                }
            }
        }
        Err(BridgeError::Lost)
    }

    /// The output of a request; dropping it cancels the request.
    pub(super) fn output_of(
        &self,
        id: RequestId,
        streams: Vec<StreamId>,
        output: mpsc::UnboundedReceiver<ExecOutput>,
    ) -> Exec {
        let (bridge, read) = (self.clone(), HashMap::new());
        Exec { bridge, id, streams, stdin: None, output, read, ended: false, detached: false }
    }

    pub(super) fn open_outgoing(&self, stream: StreamId) -> Arc<Semaphore> {
        let credit = Arc::new(Semaphore::new(INITIAL_CREDIT_BYTES as usize));
        self.table().outgoing.insert(stream, Arc::clone(&credit));
        credit
    }

    /// Sends bytes as credit allows; `false` when the receiver is gone.
    pub(super) async fn send_bytes(
        &self,
        stream: StreamId,
        credit: &Semaphore,
        bytes: &[u8],
    ) -> bool {
        for chunk in bytes.chunks(MAX_DATA_BYTES) {
            let Ok(length) = u32::try_from(chunk.len()) else { return false };
            // Closed when the connection is lost or the receiver is gone.
            let Ok(permit) = credit.acquire_many(length).await else { return false };
            permit.forget();
            let frame: Frame<ToSupervisor> = Frame::Data { stream, bytes: chunk.to_vec() };
            if self.inner.out.send(frame.encode()).is_err() {
                return false;
            }
        }
        true
    }

    pub(super) fn end_stream(&self, stream: StreamId) {
        self.send(ToSupervisor::End { stream });
        self.table().outgoing.remove(&stream);
    }

    /// The receiver of the stream is gone: pending writes to it fail.
    pub(super) fn close_stream(&self, stream: StreamId) {
        if let Some(credit) = self.table().outgoing.remove(&stream) {
            credit.close();
        }
    }
}

/// The stdin of a running command.
#[derive(Debug)]
pub struct ExecInput {
    bridge: Bridge,
    exec: RequestId,
    stream: StreamId,
    credit: Arc<Semaphore>,
}

impl ExecInput {
    /// Writes bytes as the command reads them; `false` when it never will again.
    pub async fn write(&mut self, bytes: &[u8]) -> bool {
        self.bridge.send_bytes(self.stream, &self.credit, bytes).await
    }

    pub fn end(self) {
        self.bridge.end_stream(self.stream);
    }

    /// Resizes the command's terminal.
    pub fn resize(&self, rows: u16, cols: u16) {
        let exec = self.exec;
        // The reply is ignored: a closed terminal needs no size.
        self.bridge.send(ToSupervisor::Resize { id: self.bridge.next_request(), exec, rows, cols });
    }
}

// What an event may hold of a script's output.
const TAIL_BYTES: usize = 4 * 1024;

fn append_tail(tail: &mut Vec<u8>, bytes: &[u8]) {
    tail.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
    let extra = tail.len().saturating_sub(TAIL_BYTES);
    tail.drain(..extra);
}

impl Exec {
    /// The next output; `None` when the connection is lost before the exit.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        if self.ended {
            return None;
        }
        let output = self.output.recv().await?;
        match &output {
            ExecOutput::Stdout { stream, bytes } | ExecOutput::Stderr { stream, bytes } => {
                self.return_credit(*stream, u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            }
            ExecOutput::Exited { .. } | ExecOutput::End => {
                self.ended = true;
                self.stdin.into_iter().for_each(|stream| self.bridge.close_stream(stream));
            }
        }
        Some(output)
    }

    fn return_credit(&mut self, stream: StreamId, bytes: u32) {
        let read = self.read.entry(stream).or_default();
        *read = read.saturating_add(bytes);
        if *read >= GRANT_BYTES {
            self.bridge.grant(stream, std::mem::take(read));
        }
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        let mut table = self.bridge.table();
        for stream in &self.streams {
            table.incoming.remove(stream);
        }
        table.execs.remove(&self.id);
        drop(table);
        self.stdin.into_iter().for_each(|stream| self.bridge.close_stream(stream));
        if !self.ended && !self.detached {
            let exec = self.id;
            self.bridge.send(ToSupervisor::Kill { id: self.bridge.next_request(), exec });
        }
    }
}
