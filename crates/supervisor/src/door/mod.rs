//! The inner side of the door: the sandbox's resolver, and the listener to which connections to
//! synthetic addresses are redirected. The gateway gets names, never addresses.
//!
//! While the gateway is down, lookups of new names and connections *wait* for it, so that a server
//! restart breaks nothing inside. A sealed sandbox has no gateway and is refused at once.

mod activity;
mod dns;
mod names;
mod redirect;

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use harvest_proto::{
    door::{DoorReply, DoorRequest, MAX_LINE_BYTES},
    launch::{DOOR_SOCKET, Descriptor},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket, UnixStream},
    sync::Semaphore,
    time::{Instant, sleep},
};

pub(crate) use self::activity::ModelActivity;
use self::names::Names;
use crate::launch::InheritedFds;

const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
const RETRY_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Starts the resolver and the listener if the launch includes their sockets.
pub(crate) fn open(inherited: &mut InheritedFds, sealed: bool) -> io::Result<Rc<ModelActivity>> {
    let activity = Rc::<ModelActivity>::default();
    let Some(folder) = inherited.take(Descriptor::Door) else { return Ok(activity) };
    let model_activity = Rc::clone(&activity);
    let gateway = Rc::new(Gateway { folder, sealed, names: Names::default(), model_activity });
    if let Some(socket) = inherited.take(Descriptor::DnsUdp) {
        let socket = std::net::UdpSocket::from(socket);
        socket.set_nonblocking(true)?;
        let socket = Rc::new(UdpSocket::from_std(socket)?);
        tokio::task::spawn_local(dns::serve_udp(socket, Rc::clone(&gateway)));
    }
    if let Some(listener) = inherited.take(Descriptor::DnsTcp) {
        let (listener, gateway) = (tcp(listener)?, Rc::clone(&gateway));
        tokio::task::spawn_local(accept(listener, dns::MAX_TCP_CONNECTIONS, move |stream| {
            dns::serve_connection(stream, Rc::clone(&gateway))
        }));
    }
    if let Some(listener) = inherited.take(Descriptor::Redirect) {
        let listener = tcp(listener)?;
        tokio::task::spawn_local(accept(listener, redirect::MAX_CONNECTIONS, move |stream| {
            redirect::relay(stream, Rc::clone(&gateway))
        }));
    }
    Ok(activity)
}

fn tcp(descriptor: OwnedFd) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::from(descriptor);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Accepts connections and serves each as a task. Beyond the limit they wait in the kernel's queue.
async fn accept<Served: Future + 'static>(
    listener: TcpListener,
    limit: usize,
    serve: impl Fn(TcpStream) -> Served,
) {
    let permits = Arc::new(Semaphore::new(limit));
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            // Too many open files.
            sleep(ACCEPT_RETRY_DELAY).await;
            continue;
        };
        let served = serve(stream);
        tokio::task::spawn_local(async move {
            // Not logged: processes inside can cause failures at will.
            let _refused = served.await;
            drop(permit);
        });
    }
}

/// Connects to the gateway, whose socket is in this folder while it runs.
struct Gateway {
    folder: OwnedFd,
    /// There is no gateway.
    sealed: bool,
    names: Names,
    model_activity: Rc<ModelActivity>,
}

impl Gateway {
    async fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(format!("/proc/self/fd/{}/{DOOR_SOCKET}", self.folder.as_raw_fd()))
            .await
    }

    /// Asks once. On [`DoorReply::Open`] the connection is the stream.
    async fn ask(&self, request: &DoorRequest) -> io::Result<(DoorReply, UnixStream)> {
        let mut stream = self.connect().await?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let reply = read_line(&mut stream).await?;
        Ok((serde_json::from_slice(&reply)?, stream))
    }

    /// Retries until there is a reply. A retry is safe, because nothing of the sandbox's stream has
    /// been sent yet.
    async fn ask_with_retry(&self, request: &DoorRequest) -> io::Result<(DoorReply, UnixStream)> {
        let deadline = Instant::now() + RETRY_TIMEOUT;
        loop {
            match self.ask(request).await {
                Err(error) if Instant::now() >= deadline || !is_unavailable(&error) => {
                    return Err(error);
                }
                Err(_) => sleep(RETRY_INTERVAL).await,
                reply => return reply,
            }
        }
    }
}

fn is_unavailable(error: &io::Error) -> bool {
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

// Reads byte by byte: the bytes after the line belong to the sandbox's stream.
async fn read_line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await? {
            b'\n' => return Ok(line),
            byte if line.len() < MAX_LINE_BYTES => line.push(byte),
            _ => return Err(io::Error::other("the gateway's reply is too long")),
        }
    }
}
