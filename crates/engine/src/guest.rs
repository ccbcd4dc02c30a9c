//! A guest on the bridge: dials a supervisor, runs commands and moves files, one at a time, and
//! blocks meanwhile. For builds and for a CLI without a server.

mod live;
mod tree;

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use harvest_proto::bridge::{
    Command, Decoder, Exit, Fault, FaultCode, FileRequest, FileStat, Frame, FrameError,
    FromSupervisor, INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, Reply, RequestId, Role, StreamId,
    ToSupervisor, VERSION,
};
use rustix::net::SocketType;

pub use live::{Heard, Input, Live};
pub use tree::{CopiedTree, Far, copy_in, copy_out};

use crate::zygote::client::connect_in;

/// Why a guest's wish failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The supervisor cannot be dialled.
    #[error("cannot dial the bridge {}", path.display())]
    Dial {
        /// The socket.
        path: std::path::PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the bridge broke")]
    Broken(#[source] io::Error),
    /// The bytes are not ours.
    #[error("the bridge is not understood")]
    Frame(#[from] FrameError),
    /// The supervisor speaks another version or refused.
    #[error("the supervisor does not welcome this version")]
    Unwelcome,
    /// The supervisor said no.
    #[error("the supervisor refused")]
    Refused(#[from] Fault),
    /// The local end of a file transfer failed.
    #[error("the file's local end failed")]
    Local(#[source] io::Error),
}

/// Which output of a command bytes are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A connection to a supervisor.
#[derive(Debug)]
pub struct Guest {
    socket: UnixStream,
    decoder: Decoder,
    requests: RequestId,
    streams: StreamId,
    /// The supervisor has answered our greeting.
    welcome: bool,
}

impl Guest {
    /// Dials the supervisor that answers on this socket.
    ///
    /// # Errors
    /// When nobody answers there, or in another version.
    pub fn dial(bridge: &Path) -> Result<Self, GuestError> {
        let mut guest = Self::hail(bridge)?;
        guest.await_welcome()?;
        Ok(guest)
    }

    /// Dials and does not wait for the answer, which is looked at with that to the first request: one
    /// way there and back less, for who has one command to run.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn hail(bridge: &Path) -> Result<Self, GuestError> {
        let failed = |source| GuestError::Dial { path: bridge.to_owned(), source };
        let folder = bridge.parent().unwrap_or(Path::new("."));
        let name = bridge.file_name().unwrap_or_default().to_string_lossy();
        let socket = connect_in(folder, &name, SocketType::STREAM).map_err(failed)?;
        let (socket, decoder) = (socket.into(), Decoder::default());
        let mut guest = Self { socket, decoder, requests: 0, streams: 0, welcome: false };
        guest.say(&ToSupervisor::Hello {
            version: VERSION,
            role: Role::Guest,
            heartbeat_millis: None,
        })?;
        Ok(guest)
    }

    fn await_welcome(&mut self) -> Result<(), GuestError> {
        match self.hear_any()? {
            Frame::Control(FromSupervisor::Welcome { version, .. }) if version == VERSION => {
                self.welcome = true;
                Ok(())
            }
            _ => Err(GuestError::Unwelcome),
        }
    }

    /// Runs a command to its end with `input` as its standard input. Its outputs come in pieces, in
    /// the order the supervisor read them. Stream numbers in `command` are chosen here.
    ///
    /// # Errors
    /// When the command cannot be started or the bridge breaks.
    pub fn exec(
        &mut self,
        mut command: Command,
        input: &[u8],
        output: &mut dyn FnMut(Output, &[u8]),
    ) -> Result<Exit, GuestError> {
        let id = self.request();
        (command.stdout, command.stderr) = (self.stream(), self.stream());
        let (stdout, stderr) = (command.stdout, command.stderr);
        let mut sender = (!input.is_empty()).then(|| Sender::new(self.stream()));
        command.stdin = sender.as_ref().map(|sender| sender.stream);
        self.say(&ToSupervisor::Exec { id, command: Box::new(command) })?;
        let mut input = input;
        let mut started = false;
        loop {
            if let Some(sending) = sender.as_mut().filter(|_| started)
                && sending.send(self, &mut input)?
            {
                sender = None;
            }
            match self.hear()? {
                Frame::Data { stream, bytes } if stream == stdout || stream == stderr => {
                    output(if stream == stdout { Output::Stdout } else { Output::Stderr }, &bytes);
                    self.grant(stream, bytes.len())?;
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

    /// Writes a file; it is under its name when this returns.
    ///
    /// # Errors
    /// When `from` or the supervisor fails.
    pub fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn Read,
    ) -> Result<(), GuestError> {
        let id = self.request();
        let mut sender = Some(Sender::new(self.stream()));
        let stream = sender.as_ref().map_or(0, |sender| sender.stream);
        let request = FileRequest::Write {
            path: path.to_owned(),
            mode,
            user: user.map(str::to_owned),
            stream,
        };
        self.say(&ToSupervisor::File { id, request })?;
        loop {
            if let Some(sending) = &mut sender
                && sending.send(self, from)?
            {
                sender = None;
            }
            match self.hear()? {
                Frame::Control(FromSupervisor::Reply { id: of, result }) if of == id => {
                    return result.map(drop).map_err(GuestError::from);
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

    /// Reads a file.
    ///
    /// # Errors
    /// When there is none, or `to` fails.
    pub fn read(&mut self, path: &str, to: &mut dyn Write) -> Result<(), GuestError> {
        let (id, stream) = (self.request(), self.stream());
        let request = FileRequest::Read { path: path.to_owned(), stream };
        self.say(&ToSupervisor::File { id, request })?;
        // The reply and the end of the stream come in either order.
        let (mut replied, mut ended) = (false, false);
        while !(replied && ended) {
            match self.hear()? {
                Frame::Data { stream: of, bytes } if of == stream => {
                    to.write_all(&bytes).map_err(GuestError::Local)?;
                    self.grant(stream, bytes.len())?;
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

    /// What a path is.
    ///
    /// # Errors
    /// When there is nothing.
    pub fn stat(&mut self, path: &str) -> Result<FileStat, GuestError> {
        match self.ask_file(FileRequest::Stat { path: path.to_owned(), follow: false })? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(misunderstood()),
        }
    }

    /// What a folder holds.
    ///
    /// # Errors
    /// When it is none.
    pub fn list(&mut self, path: &str) -> Result<Vec<FileStat>, GuestError> {
        match self.ask_file(FileRequest::List { path: path.to_owned(), after: None })? {
            Reply::List { entries, .. } => Ok(entries),
            _ => Err(misunderstood()),
        }
    }

    fn ask_file(&mut self, request: FileRequest) -> Result<Reply, GuestError> {
        let id = self.request();
        self.say(&ToSupervisor::File { id, request })?;
        loop {
            if let Frame::Control(FromSupervisor::Reply { id: of, result }) = self.hear()?
                && of == id
            {
                return Ok(result?);
            }
        }
    }

    fn request(&mut self) -> RequestId {
        self.requests += 1;
        self.requests
    }

    fn stream(&mut self) -> StreamId {
        self.streams += 1;
        self.streams
    }

    fn grant(&mut self, stream: StreamId, bytes: usize) -> Result<(), GuestError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.say(&ToSupervisor::Credit { stream, bytes })
    }

    fn say(&mut self, message: &ToSupervisor) -> Result<(), GuestError> {
        self.send(&Frame::Control(message.clone()).encode())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), GuestError> {
        self.socket.write_all(bytes).map_err(GuestError::Broken)
    }

    fn hear(&mut self) -> Result<Frame<FromSupervisor>, GuestError> {
        if !self.welcome {
            self.await_welcome()?;
        }
        self.hear_any()
    }

    fn hear_any(&mut self) -> Result<Frame<FromSupervisor>, GuestError> {
        let mut buffer = vec![0u8; MAX_DATA_BYTES];
        loop {
            if let Some(frame) = self.decoder.take()? {
                return Ok(frame);
            }
            match self.socket.read(&mut buffer) {
                Ok(0) => return Err(GuestError::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => self.decoder.push(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(GuestError::Broken(error)),
            }
        }
    }
}

fn misunderstood() -> GuestError {
    GuestError::Refused(Fault::new(FaultCode::System, "the supervisor answered something else"))
}

/// The sending end of a stream.
struct Sender {
    stream: StreamId,
    credit: u64,
}

impl Sender {
    fn new(stream: StreamId) -> Self {
        Self { stream, credit: INITIAL_CREDIT_BYTES.into() }
    }

    /// Sends what the credit allows; true when all is sent and the end said.
    fn send(&mut self, guest: &mut Guest, from: &mut dyn Read) -> Result<bool, GuestError> {
        let mut buffer = vec![0u8; MAX_DATA_BYTES];
        while self.credit > 0 {
            let room = usize::try_from(self.credit).unwrap_or(usize::MAX).min(buffer.len());
            let length = match from.read(&mut buffer[..room]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result.map_err(GuestError::Local)?,
            };
            if length == 0 {
                guest.say(&ToSupervisor::End { stream: self.stream })?;
                return Ok(true);
            }
            let frame: Frame<ToSupervisor> =
                Frame::Data { stream: self.stream, bytes: buffer[..length].to_vec() };
            guest.send(&frame.encode())?;
            self.credit -= length as u64;
        }
        Ok(false)
    }
}
