//! A sandbox's files over its bridge, for the tests of tree copies. A broken connection fails the
//! test.

use std::{fs::File, io, os::fd::AsRawFd};

use harvest_engine::supervisor_client::RemoteFs;
use harvest_proto::bridge::{
    BridgeRole, Decoder, Fault, FaultCode, FileRequest, FileStat, Frame, FromSupervisor,
    INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, Reply, ToSupervisor, VERSION,
};

use super::*;

pub(crate) struct BridgeFiles {
    socket: UnixStream,
    decoder: Decoder,
    /// The last id, of a request or a stream.
    last: u32,
}

#[derive(Debug)]
pub(crate) enum FilesError {
    #[expect(dead_code, reason = "only shown when a test fails")]
    Local(io::Error),
    Refused(Fault),
}

impl BridgeFiles {
    pub(crate) fn dial(running: &Running) -> Self {
        // A socket path is limited to 107 bytes.
        let folder = File::open(running.bridge.parent().unwrap()).unwrap();
        let path = format!("/proc/self/fd/{}/bridge.sock", folder.as_raw_fd());
        let socket = UnixStream::connect(path).unwrap();
        let mut files = Self { socket, decoder: Decoder::default(), last: 0 };
        let role = BridgeRole::Client;
        files.send(ToSupervisor::Hello { version: VERSION, role, heartbeat_millis: None });
        let welcome = files.receive();
        assert!(matches!(welcome, Frame::Control(FromSupervisor::Welcome { .. })), "{welcome:?}");
        files
    }

    pub(crate) fn request(&mut self, request: FileRequest) -> Result<Reply, FilesError> {
        self.request_as(None, request)
    }

    fn request_as(
        &mut self,
        user: Option<&str>,
        request: FileRequest,
    ) -> Result<Reply, FilesError> {
        let id = self.begin(user, request);
        loop {
            if let Frame::Control(FromSupervisor::Reply { id: of, result }) = self.receive()
                && of == id
            {
                return result.map_err(FilesError::Refused);
            }
        }
    }

    fn begin(&mut self, user: Option<&str>, request: FileRequest) -> u64 {
        let (id, user) = (self.next().into(), user.map(str::to_owned));
        self.send(ToSupervisor::File { id, user, request });
        id
    }

    fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    fn send(&mut self, message: ToSupervisor) {
        self.socket.write_all(&Frame::Control(message).encode()).unwrap();
    }

    fn receive(&mut self) -> Frame<FromSupervisor> {
        let mut buffer = vec![0; MAX_DATA_BYTES];
        loop {
            if let Some(frame) = self.decoder.take().unwrap() {
                return frame;
            }
            let length = self.socket.read(&mut buffer).unwrap();
            assert!(length > 0, "the supervisor closed the connection");
            self.decoder.push(&buffer[..length]);
        }
    }

    /// Sends what the credit allows; true when everything is sent.
    fn send_data(&mut self, stream: u32, from: &mut dyn Read, credit: &mut usize) -> bool {
        while *credit > 0 {
            let mut bytes = vec![0; MAX_DATA_BYTES.min(*credit)];
            let length = from.read(&mut bytes).unwrap();
            if length == 0 {
                self.send(ToSupervisor::End { stream });
                return true;
            }
            bytes.truncate(length);
            *credit -= length;
            let frame: Frame<ToSupervisor> = Frame::Data { stream, bytes };
            self.socket.write_all(&frame.encode()).unwrap();
        }
        false
    }
}

impl RemoteFs for BridgeFiles {
    type Error = FilesError;

    fn local(error: io::Error) -> FilesError {
        FilesError::Local(error)
    }

    fn is_missing(error: &FilesError) -> bool {
        matches!(error, FilesError::Refused(fault) if fault.code == FaultCode::NotFound)
    }

    fn stat(&mut self, path: &str) -> Result<FileStat, FilesError> {
        match self.request(FileRequest::Stat { path: path.to_owned(), follow: false })? {
            Reply::Stat(stat) => Ok(stat),
            other => panic!("{other:?}"),
        }
    }

    fn list_all(&mut self, path: &str) -> Result<Vec<FileStat>, FilesError> {
        let mut all: Vec<FileStat> = Vec::new();
        loop {
            let after = Some(all.last().map_or_else(String::new, |last| last.name.clone()));
            match self.request(FileRequest::List { path: path.to_owned(), after })? {
                Reply::List { entries, more } => {
                    all.extend(entries);
                    if !more {
                        return Ok(all);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn read(&mut self, path: &str, to: &mut dyn Write) -> Result<(), FilesError> {
        let stream = self.next();
        let id = self.begin(None, FileRequest::Read { path: path.to_owned(), stream });
        let (mut replied, mut ended) = (false, false);
        while !(replied && ended) {
            match self.receive() {
                Frame::Data { stream, bytes } => {
                    to.write_all(&bytes).map_err(FilesError::Local)?;
                    let bytes = bytes.len().try_into().unwrap();
                    self.send(ToSupervisor::Credit { stream, bytes });
                }
                Frame::Control(FromSupervisor::End { .. }) => ended = true,
                Frame::Control(FromSupervisor::Reply { id: of, result }) if of == id => {
                    result.map_err(FilesError::Refused)?;
                    replied = true;
                }
                Frame::Control(_) => {}
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        path: &str,
        mode: u32,
        user: Option<&str>,
        from: &mut dyn Read,
    ) -> Result<(), FilesError> {
        let (path, stream) = (path.to_owned(), self.next());
        let id = self.begin(user, FileRequest::Write { path, mode, stream });
        let (mut credit, mut sent) = (INITIAL_CREDIT_BYTES as usize, false);
        loop {
            sent = sent || self.send_data(stream, from, &mut credit);
            match self.receive() {
                Frame::Control(FromSupervisor::Credit { bytes, .. }) => credit += bytes as usize,
                Frame::Control(FromSupervisor::Reply { id: of, result }) if of == id => {
                    return result.map(drop).map_err(FilesError::Refused);
                }
                _ => {}
            }
        }
    }

    fn make_folder(&mut self, path: &str, mode: u32, user: Option<&str>) -> Result<(), FilesError> {
        self.request_as(user, FileRequest::Mkdir { path: path.to_owned(), mode }).map(drop)
    }

    fn make_link(
        &mut self,
        path: &str,
        target: &str,
        user: Option<&str>,
    ) -> Result<(), FilesError> {
        let (path, target) = (path.to_owned(), target.to_owned());
        self.request_as(user, FileRequest::Symlink { path, target }).map(drop)
    }
}
