//! A blocking client of a supervisor's bridge: runs commands, one at a time. Used by image builds,
//! benchmarks and tests; the server has its own asynchronous client, which also transfers files.

mod copy_tree;

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use harvest_proto::bridge::{
    BridgeRole, Command, Decoder, Exit, Fault, Frame, FrameError, FromSupervisor,
    INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, RequestId, StreamId, ToSupervisor, VERSION,
};
use rustix::net::SocketType;

pub use copy_tree::{CopiedTree, RemoteFs, copy_in, copy_out};

use crate::zygote::client::connect_in;

/// Why a request to a supervisor failed.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorClientError {
    /// The supervisor cannot be dialled.
    #[error("cannot connect to the sandbox at {}", path.display())]
    Dial {
        /// The bridge's socket.
        path: std::path::PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to the sandbox was lost")]
    Broken(#[source] io::Error),
    /// The supervisor sent an invalid frame.
    #[error("the sandbox sent an invalid message")]
    Frame(#[from] FrameError),
    /// The supervisor speaks another protocol version.
    #[error("the sandbox was started by another version of Harvest")]
    VersionMismatch,
    /// The supervisor refused the request.
    #[error("the sandbox refused the request")]
    Refused(#[from] Fault),
}

/// An output stream of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A blocking connection to a supervisor.
#[derive(Debug)]
pub struct SupervisorClient {
    socket: UnixStream,
    decoder: Decoder,
    last_request: RequestId,
    last_stream: StreamId,
    /// Whether the supervisor has answered `Hello`.
    welcomed: bool,
}

impl SupervisorClient {
    /// Connects to the supervisor behind this socket and waits for its welcome.
    ///
    /// # Errors
    /// When no supervisor answers, or one of another version.
    pub fn dial(bridge: &Path) -> Result<Self, SupervisorClientError> {
        let mut client = Self::dial_pipelined(bridge)?;
        client.await_welcome()?;
        Ok(client)
    }

    /// Connects without waiting for the welcome, which is checked before the first reply. Saves one
    /// round trip for callers with a single command.
    ///
    /// # Errors
    /// When nothing listens on the socket.
    pub fn dial_pipelined(bridge: &Path) -> Result<Self, SupervisorClientError> {
        let failed = |source| SupervisorClientError::Dial { path: bridge.to_owned(), source };
        let folder = bridge.parent().unwrap_or(Path::new("."));
        let name = bridge.file_name().unwrap_or_default().to_string_lossy();
        let socket = connect_in(folder, &name, SocketType::STREAM).map_err(failed)?;
        let (socket, decoder) = (socket.into(), Decoder::default());
        let mut client = Self { socket, decoder, last_request: 0, last_stream: 0, welcomed: false };
        client.send_message(&ToSupervisor::Hello {
            version: VERSION,
            role: BridgeRole::Client,
            heartbeat_millis: None,
        })?;
        Ok(client)
    }

    fn await_welcome(&mut self) -> Result<(), SupervisorClientError> {
        match self.read_frame()? {
            Frame::Control(FromSupervisor::Welcome { version, .. }) if version == VERSION => {
                self.welcomed = true;
                Ok(())
            }
            _ => Err(SupervisorClientError::VersionMismatch),
        }
    }

    /// Runs a command to completion with `input` as its standard input. `output` gets each chunk of
    /// output in the order the supervisor read it. The stream ids in `command` are overwritten.
    ///
    /// # Errors
    /// When the command cannot be started or the bridge breaks.
    pub fn exec(
        &mut self,
        mut command: Command,
        input: &[u8],
        output: &mut dyn FnMut(Output, &[u8]),
    ) -> Result<Exit, SupervisorClientError> {
        let id = self.next_request();
        (command.stdout, command.stderr) = (self.next_stream(), self.next_stream());
        let (stdout, stderr) = (command.stdout, command.stderr);
        let mut input = (!input.is_empty()).then(|| Input {
            stream: self.next_stream(),
            rest: input,
            credit: INITIAL_CREDIT_BYTES as usize,
            ended: false,
        });
        command.stdin = input.as_ref().map(|input| input.stream);
        self.send_message(&ToSupervisor::Exec { id, command: Box::new(command) })?;
        let mut started = false;
        loop {
            if let Some(input) = input.as_mut().filter(|_| started) {
                input.send(self)?;
            }
            match self.next_frame()? {
                Frame::Data { stream, bytes } if stream == stdout || stream == stderr => {
                    output(if stream == stdout { Output::Stdout } else { Output::Stderr }, &bytes);
                    self.grant_credit(stream, bytes.len())?;
                }
                Frame::Control(FromSupervisor::Reply { id: of, result }) if of == id => {
                    result?;
                    started = true;
                }
                Frame::Control(FromSupervisor::Exited { exec, exit, .. }) if exec == id => {
                    return Ok(exit);
                }
                Frame::Control(FromSupervisor::Credit { stream, bytes }) => {
                    if let Some(input) = input.as_mut().filter(|input| input.stream == stream) {
                        input.credit += bytes as usize;
                    }
                }
                _ => {}
            }
        }
    }

    fn next_request(&mut self) -> RequestId {
        self.last_request += 1;
        self.last_request
    }

    fn next_stream(&mut self) -> StreamId {
        self.last_stream += 1;
        self.last_stream
    }

    fn grant_credit(
        &mut self,
        stream: StreamId,
        bytes: usize,
    ) -> Result<(), SupervisorClientError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.send_message(&ToSupervisor::Credit { stream, bytes })
    }

    fn send_message(&mut self, message: &ToSupervisor) -> Result<(), SupervisorClientError> {
        self.send_bytes(&Frame::Control(message.clone()).encode())
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), SupervisorClientError> {
        self.socket.write_all(bytes).map_err(SupervisorClientError::Broken)
    }

    fn next_frame(&mut self) -> Result<Frame<FromSupervisor>, SupervisorClientError> {
        if !self.welcomed {
            self.await_welcome()?;
        }
        self.read_frame()
    }

    fn read_frame(&mut self) -> Result<Frame<FromSupervisor>, SupervisorClientError> {
        let mut buffer = vec![0u8; MAX_DATA_BYTES];
        loop {
            if let Some(frame) = self.decoder.take()? {
                return Ok(frame);
            }
            match self.socket.read(&mut buffer) {
                Ok(0) => {
                    return Err(SupervisorClientError::Broken(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(length) => self.decoder.push(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(SupervisorClientError::Broken(error)),
            }
        }
    }
}

/// The standard input of a command, sent as far as the supervisor grants credit.
struct Input<'a> {
    stream: StreamId,
    rest: &'a [u8],
    credit: usize,
    /// The end marker is sent.
    ended: bool,
}

impl Input<'_> {
    fn send(&mut self, client: &mut SupervisorClient) -> Result<(), SupervisorClientError> {
        let stream = self.stream;
        while self.credit > 0 && !self.rest.is_empty() {
            let length = self.rest.len().min(self.credit).min(MAX_DATA_BYTES);
            let (chunk, rest) = self.rest.split_at(length);
            let frame: Frame<ToSupervisor> = Frame::Data { stream, bytes: chunk.to_vec() };
            client.send_bytes(&frame.encode())?;
            (self.rest, self.credit) = (rest, self.credit - length);
        }
        if self.rest.is_empty() && !self.ended {
            self.ended = true;
            client.send_message(&ToSupervisor::End { stream })?;
        }
        Ok(())
    }
}
