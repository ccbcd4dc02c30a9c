//! A sandbox's door. Each connection starts with one line that says what it is for; this file
//! dispatches it to `model`, `git`, `mcp`, `forge_api` or `egress`.

use std::{
    fs, io,
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::FutureExt as _;
use harvest_proto::door::{DoorReply, DoorRequest, GIT_NAME, MAX_LINE_BYTES, MCP_NAME, MODEL_NAME};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::UnixListener,
    sync::Semaphore,
    time::timeout,
};

use crate::{
    door::Door,
    egress, forge_api, git, http, mcp, model,
    policy::{self, Verdict},
    traffic::Counted,
};

/// A connection from a sandbox, with the bytes that followed its first line.
type Stream = BufReader<Box<dyn DoorStream>>;

// Far above what package managers open at once, far below the machine's limit of file descriptors.
const MAX_CONNECTIONS: usize = 512;
// The supervisor writes the line at once; only a hostile client is slower.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
// When the process is out of file descriptors, a retry helps only after one was closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

// How long the network log may lag behind.
const TRAFFIC_INTERVAL: Duration = Duration::from_secs(1);

/// A connection that a sandbox opened.
pub trait DoorStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> DoorStream for T {}

/// Accepts the connections that one sandbox opens. A provider on this host listens on a
/// [`DoorSocket`]; a remote one may receive them in any way.
#[async_trait]
pub trait DoorListener: Send {
    /// Waits for the next connection. Cancel-safe.
    async fn accept(&mut self) -> io::Result<Box<dyn DoorStream>>;
}

/// An open door. Dropping it closes the door: stops accepting and cuts all connections.
#[must_use = "a door closes when its handle is dropped"]
#[derive(Debug)]
pub struct DoorHandle {
    door: Arc<Door>,
}

impl Drop for DoorHandle {
    fn drop(&mut self) {
        self.door.closed.cancel();
    }
}

impl DoorHandle {
    pub(crate) fn open(door: Door, listener: Box<dyn DoorListener>) -> Self {
        let door = Arc::new(door);
        tokio::spawn(accept(Arc::clone(&door), listener));
        tokio::spawn(store_traffic(Arc::clone(&door)));
        Self { door }
    }
}

/// A door as a Unix socket on this host. Dropping it removes the socket.
pub struct DoorSocket {
    listener: UnixListener,
    path: PathBuf,
    file: (u64, u64),
}

impl DoorSocket {
    /// Listens at `path`, in place of an earlier socket there.
    ///
    /// # Errors
    /// When the socket cannot be created.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let invalid = || {
            let message = "the path of the door has no folder or no name";
            io::Error::new(io::ErrorKind::InvalidInput, message)
        };
        let folder = fs::File::open(path.parent().ok_or_else(invalid)?)?;
        let name = path.file_name().ok_or_else(invalid)?;
        // A socket address holds a path of at most 107 bytes; a path through the folder's
        // descriptor is short enough.
        let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
        match fs::remove_file(&short) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&short)?;
        // The supervisor connects under another uid; the private folder above keeps all others out.
        fs::set_permissions(&short, fs::Permissions::from_mode(0o666))?;
        Ok(Self { listener, path: path.to_owned(), file: file_identity(&short)? })
    }
}

#[async_trait]
impl DoorListener for DoorSocket {
    async fn accept(&mut self) -> io::Result<Box<dyn DoorStream>> {
        let (stream, _) = self.listener.accept().await?;
        Ok(Box::new(stream))
    }
}

impl Drop for DoorSocket {
    fn drop(&mut self) {
        // A newer door may listen at the same path; its socket must stay.
        if file_identity(&self.path).is_ok_and(|file| file == self.file)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(socket = %self.path.display(), %error, "cannot remove the socket of a closed door");
        }
    }
}

fn file_identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

async fn accept(door: Arc<Door>, mut listener: Box<dyn DoorListener>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = door.closed.cancelled() => return,
        };
        let Ok(mut stream) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            // Best effort, without waiting: the connection is closed in any case.
            let _ = stream.write(&line(&refused("too many connections"))).now_or_never();
            continue;
        };
        let door = Arc::clone(&door);
        tokio::spawn(async move {
            let closed = door.closed.clone();
            tokio::select! {
                () = serve(door, BufReader::new(stream)) => {}
                () = closed.cancelled() => {}
            }
            drop(slot);
        });
    }
}

/// Stores the counts of connections from time to time, and once more when the door is closed.
async fn store_traffic(door: Arc<Door>) {
    loop {
        let is_closed = timeout(TRAFFIC_INTERVAL, door.closed.cancelled()).await.is_ok();
        door.store_traffic().await;
        if is_closed {
            return;
        }
    }
}

async fn serve(door: Arc<Door>, mut stream: Stream) {
    let request = match timeout(REQUEST_TIMEOUT, read_request(&mut stream)).await {
        Ok(Ok(request)) => request,
        Ok(Err(error)) => {
            return tracing::debug!(%error, "a connection to the door sent no valid request");
        }
        Err(_) => return,
    };
    match request {
        DoorRequest::Lookup { name } => {
            let network = door.network();
            let reply = if is_gateway_name(&door, &name) || policy::allows_name(&network, &name) {
                DoorReply::Open
            } else {
                refused(&door.refuse(&name, 0, policy::judge(&network, &name, 443)).await)
            };
            // The sandbox may have closed the connection.
            let _ = stream.write_all(&line(&reply)).await;
        }
        DoorRequest::Connect { name, port } => connect(door, stream, &name, port).await,
    }
}

async fn connect(door: Arc<Door>, mut stream: Stream, name: &str, port: u16) {
    if is_gateway_name(&door, name) && port == 80 {
        if stream.write_all(&line(&DoorReply::Open)).await.is_err() {
            return;
        }
        return match policy::normalize(name).as_deref() {
            Some(MODEL_NAME) => {
                http::serve(stream, |request| model::answer(Arc::clone(&door), request)).await
            }
            Some(MCP_NAME) => {
                http::serve(stream, |request| mcp::answer(Arc::clone(&door), request)).await
            }
            _ => http::serve(stream, |request| git::answer(Arc::clone(&door), request)).await,
        };
    }
    if is_gateway_name(&door, name)
        && port == 443
        && policy::normalize(name).as_deref() == Some(GIT_NAME)
        && let (Some(tools), Some(authority)) = (&door.tools, &door.shared.config.authority)
    {
        if stream.write_all(&line(&DoorReply::Open)).await.is_ok() {
            forge_api::serve(&door, tools.as_ref(), authority, stream).await;
        }
        return;
    }
    let verdict = policy::judge(&door.network(), name, port);
    let Verdict::Allowed { private } = verdict else {
        let reply = refused(&door.refuse(name, port, verdict).await);
        // The sandbox may have closed the connection.
        let _ = stream.write_all(&line(&reply)).await;
        return;
    };
    match egress::connect(&door.shared.config, &door.lookups, name, port, private).await {
        Ok(upstream) => {
            if stream.write_all(&line(&DoorReply::Open)).await.is_ok() {
                forward(&door, stream, upstream, name, port, private).await;
            }
        }
        Err(reason) => {
            let private = reason == egress::PRIVATE_ADDRESS;
            let hint = private.then(|| policy::private_hint(name, port));
            let reason = Verdict::Refused { reason: reason.into(), hint };
            let reply = refused(&door.refuse(name, port, reason).await);
            let _ = stream.write_all(&line(&reply)).await;
        }
    }
}

/// Forwards a connection until it ends, or until the policy no longer allows it.
async fn forward(
    door: &Door,
    stream: Stream,
    upstream: egress::OpenConnection,
    name: &str,
    port: u16,
    private: bool,
) {
    let name_in_log = policy::normalize(name).unwrap_or_default();
    let stream = Counted { stream, bytes: door.traffic.connected(&name_in_log, port) };
    let interception = egress::Interception::of(door, name, port).await;
    let refused = tokio::select! {
        ended = egress::forward(stream, upstream, name, port, interception) => {
            ended.err().map(|reason| Verdict::Refused { reason: reason.into(), hint: None })
        }
        refused = door.no_longer_allowed(name, port, private) => Some(refused),
    };
    if let Some(refused) = refused {
        door.refuse(name, port, refused).await;
    }
}

fn is_gateway_name(door: &Door, name: &str) -> bool {
    let is_own = |name: String| [MODEL_NAME, GIT_NAME, MCP_NAME].contains(&name.as_str());
    !door.names_only && policy::normalize(name).is_some_and(is_own)
}

async fn read_request(stream: &mut Stream) -> io::Result<DoorRequest> {
    let mut bytes = Vec::new();
    stream.take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut bytes).await?;
    if !bytes.ends_with(b"\n") {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the request line is incomplete"));
    }
    serde_json::from_slice(&bytes).map_err(io::Error::from)
}

fn refused(reason: &str) -> DoorReply {
    // JSON escaping may turn a character into six bytes; the line must stay below its limit.
    DoorReply::Refused { reason: reason.chars().take(150).collect() }
}

fn line(reply: &DoorReply) -> Vec<u8> {
    let mut line = serde_json::to_vec(reply).expect("a reply consists of strings");
    line.push(b'\n');
    line
}
