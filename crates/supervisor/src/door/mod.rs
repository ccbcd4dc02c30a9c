//! The inside end of the door: the sandbox's resolver and the listener that every connection to a
//! synthetic address is redirected to. Names go to the gateway, addresses never leave.
//!
//! While the gateway is away, look-ups of new names and connections *wait* for it: a restart of the
//! server must not fail what runs inside. A sealed sandbox has none to wait for: it is refused at once.

mod dns;
mod names;
mod redirect;

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    rc::Rc,
    time::Duration,
};

use harvest_proto::{
    door::{Answer, Ask, MAX_LINE_BYTES},
    launch::{DOOR_SOCKET, Descriptor},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket, UnixStream},
    time::{Instant, sleep},
};

use crate::birth::Inheritance;

const LOOK: Duration = Duration::from_millis(100);
const PARK_LIMIT: Duration = Duration::from_secs(10 * 60);

/// Starts resolver and listener, where the launch brings them.
pub(crate) fn open(inheritance: &mut Inheritance, sealed: bool) -> io::Result<()> {
    let Some(folder) = inheritance.take(Descriptor::Door) else { return Ok(()) };
    let gateway = Rc::new(Gateway { folder, sealed });
    let names = Rc::new(names::Names::default());
    if let Some(socket) = inheritance.take(Descriptor::DnsUdp) {
        let socket = std::net::UdpSocket::from(socket);
        socket.set_nonblocking(true)?;
        let socket = Rc::new(UdpSocket::from_std(socket)?);
        tokio::task::spawn_local(dns::serve_udp(socket, Rc::clone(&gateway), Rc::clone(&names)));
    }
    if let Some(listener) = inheritance.take(Descriptor::DnsTcp) {
        let listener = tcp(listener)?;
        tokio::task::spawn_local(dns::serve_tcp(listener, Rc::clone(&gateway), Rc::clone(&names)));
    }
    if let Some(listener) = inheritance.take(Descriptor::Redirect) {
        tokio::task::spawn_local(redirect::serve(tcp(listener)?, gateway, names));
    }
    Ok(())
}

fn tcp(descriptor: OwnedFd) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::from(descriptor);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// The way to the gateway: a folder that holds its socket while it is there.
struct Gateway {
    folder: OwnedFd,
    /// There never will be one.
    sealed: bool,
}

impl Gateway {
    async fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(format!("/proc/self/fd/{}/{DOOR_SOCKET}", self.folder.as_raw_fd()))
            .await
    }

    /// Asks once; the connection is the stream when the answer is [`Answer::Open`].
    async fn ask(&self, ask: &Ask) -> io::Result<(Answer, UnixStream)> {
        let mut stream = self.connect().await?;
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let answer = read_line(&mut stream).await?;
        Ok((serde_json::from_slice(&answer)?, stream))
    }

    /// Asks until there is an answer. A gateway that goes away before it answers is asked again:
    /// nothing has been sent for the sandbox yet.
    async fn ask_parked(&self, ask: &Ask) -> io::Result<(Answer, UnixStream)> {
        let deadline = Instant::now() + PARK_LIMIT;
        loop {
            match self.ask(ask).await {
                Err(error) if Instant::now() >= deadline || !is_absence(&error) => {
                    return Err(error);
                }
                Err(_) => sleep(LOOK).await,
                answered => return answered,
            }
        }
    }
}

fn is_absence(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::NotFound
            | Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::BrokenPipe
            | Kind::UnexpectedEof
            | Kind::WouldBlock
    )
}

// Byte by byte: whatever follows the line belongs to the sandbox's stream.
async fn read_line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await? {
            b'\n' => return Ok(line),
            byte if line.len() < MAX_LINE_BYTES => line.push(byte),
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the gateway's answer is too long",
                ));
            }
        }
    }
}
