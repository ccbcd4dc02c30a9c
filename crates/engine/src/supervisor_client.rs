//! A blocking client of a supervisor's bridge: runs commands and transfers files, one request at a
//! time. Used by image builds, benchmarks and tests; the server has its own asynchronous client.

mod copy_tree;

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use harvest_proto::bridge::{
    BridgeRole, Command, Decoder, Exit, Fault, FaultCode, FileRequest, FileStat, Frame, FrameError,
    FromSupervisor, INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, Reply, RequestId, StreamId, ToSupervisor,
    VERSION,
};
use rustix::net::SocketType;

pub use copy_tree::{CopiedTree, RemoteFs, copy_in, copy_out};

use crate::zygote::client::connect_in;

/// Why a request to a supervisor failed.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorClientError {
    /// The supervisor cannot be dialled.
    #[error("cannot connect to the bridge {}", path.display())]
    Dial {
        /// The bridge's socket.
        path: std::path::PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to the supervisor broke")]
    Broken(#[source] io::Error),
    /// The supervisor sent an invalid frame.
    #[error("the supervisor sent an invalid frame")]
    Frame(#[from] FrameError),
    /// The supervisor speaks another protocol version.
    #[error("the supervisor does not speak this version of the bridge protocol")]
    VersionMismatch,
    /// The supervisor refused the request.
    #[error("the supervisor refused the request")]
    Refused(#[from] Fault),
    /// The local file of a transfer failed.
    #[error("the local side of the file transfer failed")]
    Local(#[source] io::Error),
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
        let mut sender = (!input.is_empty()).then(|| Sender::new(self.next_stream()));
        command.stdin = sender.as_ref().map(|sender| sender.stream);
        self.send_message(&ToSupervisor::Exec { id, command: Box::new(command) })?;
        let mut input = input;
        let mut started = false;
        loop {
            if let Some(sending) = sender.as_mut().filter(|_| started)
                && sending.send(self, &mut input)?
            {
                sender = None;
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
                    if let Some(sending) =
                        sender.as_mut().filter(|sending| sending.stream == stream)
                    {
                        sending.credit += u64::from(bytes);
                    }
                }
                _ => {}
            }
        }
    }

    /// Writes a file. The file has its final name when this returns.
    ///
    /// # Errors
    /// When `from` or the supervisor fails.
    pub fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn Read,
    ) -> Result<(), SupervisorClientError> {
        let id = self.next_request();
        let mut sender = Some(Sender::new(self.next_stream()));
        let stream = sender.as_ref().map_or(0, |sender| sender.stream);
        let request = FileRequest::Write {
            path: path.to_owned(),
            mode,
            user: user.map(str::to_owned),
            stream,
        };
        self.send_message(&ToSupervisor::File { id, request })?;
        loop {
            if let Some(sending) = &mut sender
                && sending.send(self, from)?
            {
                sender = None;
            }
            match self.next_frame()? {
                Frame::Control(FromSupervisor::Reply { id: of, result }) if of == id => {
                    return result.map(drop).map_err(SupervisorClientError::from);
                }
                Frame::Control(FromSupervisor::Credit { stream: of, bytes }) if of == stream => {
                    if let Some(sending) = &mut sender {
                        sending.credit += u64::from(bytes);
                    }
                }
                _ => {}
            }
        }
    }

    /// Reads a file into `to`.
    ///
    /// # Errors
    /// When the file does not exist, or `to` fails.
    pub fn read(&mut self, path: &str, to: &mut dyn Write) -> Result<(), SupervisorClientError> {
        let (id, stream) = (self.next_request(), self.next_stream());
        let request = FileRequest::Read { path: path.to_owned(), stream };
        self.send_message(&ToSupervisor::File { id, request })?;
        // The reply and the end of the stream arrive in either order.
        let (mut replied, mut ended) = (false, false);
        while !(replied && ended) {
            match self.next_frame()? {
                Frame::Data { stream: of, bytes } if of == stream => {
                    to.write_all(&bytes).map_err(SupervisorClientError::Local)?;
                    self.grant_credit(stream, bytes.len())?;
                }
                Frame::Control(FromSupervisor::End { stream: of }) if of == stream => ended = true,
                Frame::Control(FromSupervisor::Reply { id: of, result }) if of == id => {
                    result?;
                    replied = true;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The metadata of a path. A symbolic link is not followed.
    ///
    /// # Errors
    /// When the path does not exist.
    pub fn stat(&mut self, path: &str) -> Result<FileStat, SupervisorClientError> {
        match self.file_request(FileRequest::Stat { path: path.to_owned(), follow: false })? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(unexpected_reply()),
        }
    }

    /// The entries of a folder.
    ///
    /// # Errors
    /// When the path is not a folder, or its entries do not fit one reply.
    pub fn list(&mut self, path: &str) -> Result<Vec<FileStat>, SupervisorClientError> {
        match self.file_request(FileRequest::List { path: path.to_owned(), after: None })? {
            Reply::List { entries, .. } => Ok(entries),
            _ => Err(unexpected_reply()),
        }
    }

    fn file_request(&mut self, request: FileRequest) -> Result<Reply, SupervisorClientError> {
        let id = self.next_request();
        self.send_message(&ToSupervisor::File { id, request })?;
        loop {
            if let Frame::Control(FromSupervisor::Reply { id: of, result }) = self.next_frame()?
                && of == id
            {
                return Ok(result?);
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

fn unexpected_reply() -> SupervisorClientError {
    SupervisorClientError::Refused(Fault::new(
        FaultCode::System,
        "the supervisor sent an unexpected reply",
    ))
}

/// The sending side of a stream, limited by the credit the supervisor grants.
struct Sender {
    stream: StreamId,
    credit: u64,
}

impl Sender {
    fn new(stream: StreamId) -> Self {
        Self { stream, credit: INITIAL_CREDIT_BYTES.into() }
    }

    /// Sends as much as the credit allows. Returns true when everything and the end marker are
    /// sent.
    fn send(
        &mut self,
        client: &mut SupervisorClient,
        from: &mut dyn Read,
    ) -> Result<bool, SupervisorClientError> {
        let mut buffer = vec![0u8; MAX_DATA_BYTES];
        while self.credit > 0 {
            let limit = usize::try_from(self.credit).unwrap_or(usize::MAX).min(buffer.len());
            let length = match from.read(&mut buffer[..limit]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result.map_err(SupervisorClientError::Local)?,
            };
            if length == 0 {
                client.send_message(&ToSupervisor::End { stream: self.stream })?;
                return Ok(true);
            }
            let frame: Frame<ToSupervisor> =
                Frame::Data { stream: self.stream, bytes: buffer[..length].to_vec() };
            client.send_bytes(&frame.encode())?;
            self.credit -= length as u64;
        }
        Ok(false)
    }
}
