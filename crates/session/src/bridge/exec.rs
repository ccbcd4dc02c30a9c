//! Commands run over the bridge.

use std::{collections::HashMap, sync::Arc};

use harvest_proto::bridge::{
    Command, Exit, Frame, INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, Reply, RequestId, StreamId,
    ToSupervisor,
};
use tokio::sync::{Semaphore, mpsc};

use super::{Bridge, BridgeError, StreamKind};

// Grants are given back in pieces, not for every byte: a quarter of what may be in flight.
const GRANT_BYTES: u32 = INITIAL_CREDIT_BYTES / 4;

/// What a command says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecOutput {
    /// Bytes of stdout, or of a file.
    Stdout {
        /// The stream they came on.
        stream: StreamId,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Bytes of stderr.
    Stderr {
        /// The stream they came on.
        stream: StreamId,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A file has ended.
    End,
    /// It ended; nothing follows.
    Exited {
        /// How.
        exit: Exit,
        /// From start to end.
        millis: u64,
    },
}

/// A command that runs. It is killed when this is dropped before it ended, unless it is detached.
#[derive(Debug)]
pub struct Exec {
    pub(super) bridge: Bridge,
    pub(super) id: RequestId,
    pub(super) streams: Vec<StreamId>,
    pub(super) stdin: Option<StreamId>,
    pub(super) output: mpsc::UnboundedReceiver<ExecOutput>,
    pub(super) read: HashMap<StreamId, u32>,
    pub(super) ended: bool,
    /// It goes on without us.
    pub(super) detached: bool,
}

/// What a whole command gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub exit: Exit,
    /// From start to end.
    pub millis: u64,
    /// What it wrote to stdout, cut at the caller's limit.
    pub stdout: Vec<u8>,
    /// The last of what it wrote to both.
    pub tail: Vec<u8>,
    /// Whether stdout was cut.
    pub cut: bool,
}

impl Output {
    /// Whether it ended by itself with code 0.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.exit == Exit::Code(0)
    }

    /// The last lines, as text.
    #[must_use]
    pub fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).trim_end().to_owned()
    }
}

impl Bridge {
    /// Runs a command; the streams of its outputs are chosen here. `stdin` is what it reads.
    ///
    /// # Errors
    /// When it could not be started.
    pub async fn exec(
        &self,
        command: Command,
        stdin: Option<Vec<u8>>,
    ) -> Result<Exec, BridgeError> {
        let (exec, input) = self.exec_open(command, stdin.is_some()).await?;
        if let (Some(bytes), Some(mut input)) = (stdin, input) {
            // On its own: a command that never reads must not keep us from hearing what it says.
            tokio::spawn(async move {
                if input.write(&bytes).await {
                    input.end();
                }
            });
        }
        Ok(exec)
    }

    /// Runs a command that reads, if it is to read at all, what is written to it while it runs.
    ///
    /// # Errors
    /// When it could not be started, or was to have a terminal and its supervisor has none.
    pub async fn exec_open(
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
        let (wants_terminal, detached) = (command.terminal.is_some(), command.detached);
        let credit = stdin.map(|stream| (stream, self.sending(stream)));
        let posted = self.post(|id| {
            // Before it is sent: a short command has ended before this thread may run again.
            self.table().execs.insert(id, to);
            ToSupervisor::Exec { id, command: Box::new(command) }
        })?;
        let id = posted.id;
        let read = HashMap::new();
        let mut exec =
            Exec { bridge: self.clone(), id, streams, stdin, output, read, ended: false, detached };
        match posted.reply().await {
            // It runs, but not as it should: dropped, it is killed.
            Ok(Reply::Started { terminal: false, .. }) if wants_terminal => {
                Err(BridgeError::Outdated)
            }
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

    /// Runs a command to its end, keeping at most `limit` bytes of its stdout and of its tail.
    ///
    /// # Errors
    /// When it could not be started, or the connection was lost before it ended.
    pub async fn run_command(&self, command: Command, limit: usize) -> Result<Output, BridgeError> {
        let mut exec = self.exec(command, None).await?;
        let (mut stdout, mut tail, mut cut) = (Vec::new(), Vec::new(), false);
        while let Some(output) = exec.next().await {
            match output {
                ExecOutput::Stdout { bytes, .. } => {
                    let room = limit.saturating_sub(stdout.len()).min(bytes.len());
                    stdout.extend_from_slice(&bytes[..room]);
                    cut |= room < bytes.len();
                    keep_tail(&mut tail, &bytes);
                }
                ExecOutput::Stderr { bytes, .. } => keep_tail(&mut tail, &bytes),
                ExecOutput::End => {}
                ExecOutput::Exited { exit, millis } => {
                    return Ok(Output { exit, millis, stdout, tail, cut });
                }
            }
        }
        Err(BridgeError::Lost)
    }

    pub(super) fn sending(&self, stream: StreamId) -> Arc<Semaphore> {
        let credit = Arc::new(Semaphore::new(INITIAL_CREDIT_BYTES as usize));
        self.table().outgoing.insert(stream, Arc::clone(&credit));
        credit
    }

    /// Sends bytes as they are granted; false when nobody will read them.
    pub(super) async fn send_bytes(
        &self,
        stream: StreamId,
        credit: &Semaphore,
        bytes: &[u8],
    ) -> bool {
        for piece in bytes.chunks(MAX_DATA_BYTES) {
            let Ok(length) = u32::try_from(piece.len()) else { return false };
            // Closed when the connection is lost or the reader is gone.
            let Ok(permit) = credit.acquire_many(length).await else { return false };
            permit.forget();
            let frame: Frame<ToSupervisor> = Frame::Data { stream, bytes: piece.to_vec() };
            if self.wire.out.send(frame.encode()).is_err() {
                return false;
            }
        }
        true
    }

    /// Says that no more comes.
    pub(super) fn end_stream(&self, stream: StreamId) {
        self.say(ToSupervisor::End { stream });
        self.table().outgoing.remove(&stream);
    }

    /// Nobody reads this stream any more: whoever writes to it hears that.
    pub(super) fn close_stream(&self, stream: StreamId) {
        if let Some(credit) = self.table().outgoing.remove(&stream) {
            credit.close();
        }
    }
}

/// What a running command reads.
#[derive(Debug)]
pub struct ExecInput {
    bridge: Bridge,
    exec: RequestId,
    stream: StreamId,
    credit: Arc<Semaphore>,
}

impl ExecInput {
    /// Sends bytes, waiting while the command does not read; false when it never will again.
    pub async fn write(&mut self, bytes: &[u8]) -> bool {
        self.bridge.send_bytes(self.stream, &self.credit, bytes).await
    }

    /// Says that no more comes.
    pub fn end(self) {
        self.bridge.end_stream(self.stream);
    }

    /// Gives the command's terminal another size. Only for a command that has one.
    pub fn resize(&self, rows: u16, cols: u16) {
        let exec = self.exec;
        // Nobody waits for the reply: a terminal that is gone needs no size.
        self.bridge.say(ToSupervisor::Resize { id: self.bridge.next_request(), exec, rows, cols });
    }
}

// What an event may hold of a script's last words.
const TAIL_BYTES: usize = 4 * 1024;

fn keep_tail(tail: &mut Vec<u8>, bytes: &[u8]) {
    tail.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
    let extra = tail.len().saturating_sub(TAIL_BYTES);
    tail.drain(..extra);
}

impl Exec {
    /// What it says next; `None` when the connection was lost before it ended.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        if self.ended {
            return None;
        }
        let output = self.output.recv().await?;
        match &output {
            ExecOutput::Stdout { stream, bytes } | ExecOutput::Stderr { stream, bytes } => {
                self.was_read(*stream, u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            }
            ExecOutput::Exited { .. } | ExecOutput::End => {
                self.ended = true;
                self.stdin.into_iter().for_each(|stream| self.bridge.close_stream(stream));
            }
        }
        Some(output)
    }

    fn was_read(&mut self, stream: StreamId, bytes: u32) {
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
            self.bridge.say(ToSupervisor::Kill { id: self.bridge.next_request(), exec });
        }
    }
}
