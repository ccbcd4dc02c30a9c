//! A proxy between a server and a supervisor that forwards frames and injects faults.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

/// The direction of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    In,
    Out,
}

/// A frame being forwarded, with the index of its connection and its own index there.
pub(super) struct Passing<'a> {
    pub(super) connection: usize,
    pub(super) way: Way,
    pub(super) index: usize,
    pub(super) frame: &'a mut Vec<u8>,
}

/// What the proxy does with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Pass,
    /// Forwards this many bytes, then closes the connection.
    Cut(usize),
}

type Judge = Arc<Mutex<dyn FnMut(Passing<'_>) -> Fate + Send>>;

/// Listens on a bridge's socket path until dropped.
pub(super) struct Between {
    socket: PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl Between {
    /// Replaces the supervisor's socket. Existing connections are not affected.
    pub(super) fn at(
        socket: &Path,
        judge: impl FnMut(Passing<'_>) -> Fate + Send + 'static,
    ) -> Self {
        let real = socket.with_file_name("real.sock");
        std::fs::rename(socket, &real).unwrap();
        let listener = UnixListener::bind(socket).unwrap();
        let judge: Judge = Arc::new(Mutex::new(judge));
        let task = tokio::spawn(async move {
            for connection in 0.. {
                let (theirs, _) = listener.accept().await.unwrap();
                let ours = UnixStream::connect(&real).await.unwrap();
                tokio::spawn(serve(theirs, ours, connection, Arc::clone(&judge)));
            }
        });
        Self { socket: socket.to_owned(), task }
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.task.abort();
        let _gone_with_the_sandbox =
            std::fs::rename(self.socket.with_file_name("real.sock"), &self.socket);
    }
}

async fn serve(theirs: UnixStream, ours: UnixStream, connection: usize, judge: Judge) {
    let (from_server, to_server) = theirs.into_split();
    let (from_inside, to_inside) = ours.into_split();
    tokio::select! {
        () = pass(from_server, to_inside, (connection, Way::In), &judge) => {}
        () = pass(from_inside, to_server, (connection, Way::Out), &judge) => {}
    }
}

/// Forwards whole frames until a fault ends the connection.
async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    (connection, way): (usize, Way),
    judge: &Judge,
) {
    let mut buffer = Vec::new();
    let mut index = 0;
    while from.read_buf(&mut buffer).await.is_ok_and(|count| count > 0) {
        while let Some(head) = buffer.first_chunk::<4>() {
            let length = 4 + u32::from_be_bytes(*head) as usize;
            if buffer.len() < length {
                break;
            }
            let mut frame: Vec<u8> = buffer.drain(..length).collect();
            let fate =
                (judge.lock().unwrap())(Passing { connection, way, index, frame: &mut frame });
            index += 1;
            let sent = match fate {
                Fate::Pass => &frame[..],
                Fate::Cut(at) => &frame[..at.min(frame.len())],
            };
            if to.write_all(sent).await.is_err() || fate != Fate::Pass {
                return;
            }
        }
    }
}
