//! One sandbox's door: a Unix socket whose connections each say in one line what they are for.
//! Decides where a connection goes; what happens there is `model`'s, `git`'s and `egress`'s.

use std::{
    collections::HashMap,
    fs, io,
    os::{
        fd::AsRawFd,
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::UnixListener as StdListener,
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use harvest_proto::{
    EventBody,
    door::{Answer, Ask, GIT_NAME, MAX_LINE_BYTES, MODEL_NAME},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{Shared, egress, git, http, ledger::Pass, model, policy};

/// A connection from inside, with whatever followed its first line.
pub(crate) type Stream = BufReader<UnixStream>;

// Far above what package managers open at once, far below what would use up the host's descriptors.
const MAX_CONNECTIONS: usize = 512;
// The line is written by the supervisor in one go; only a hostile client is slower.
const ASK_LIMIT: Duration = Duration::from_secs(10);
// A refused name is told once a minute, and no more than so many names, so that a loop inside
// cannot fill the session's history.
const REFUSAL_REPEAT: Duration = Duration::from_secs(60);
const MAX_REFUSALS: usize = 64;
// Two of the longest requests there are, or hundreds of usual ones, at a time; the next ones wait.
const MAX_HELD_KIB: usize = 64 * 1024;
// When the host is out of descriptors, the next try needs somebody to close one first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// An open door. Dropping it closes the door: nothing more is accepted, connections are cut and the
/// socket is removed.
#[must_use = "a door closes when its handle is dropped"]
#[derive(Debug)]
pub struct DoorHandle {
    door: Arc<Door>,
    socket: PathBuf,
    file: (u64, u64),
}

impl DoorHandle {
    /// Closes the door.
    pub fn close(self) {}

    /// Changes what the sandbox may do. Connections that are open go on under the old pass.
    pub fn set_pass(&self, pass: Pass) {
        *self.door.pass.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(pass);
    }
}

impl Drop for DoorHandle {
    fn drop(&mut self) {
        self.door.closed.cancel();
        // A newer door may already listen under the same path; that file is not ours to remove.
        if file_identity(&self.socket).is_ok_and(|file| file == self.file)
            && let Err(error) = fs::remove_file(&self.socket)
        {
            tracing::warn!(socket = %self.socket.display(), %error, "cannot remove a closed door's socket");
        }
    }
}

/// What the connections of one door share.
pub(crate) struct Door {
    pub(crate) shared: Arc<Shared>,
    pass: RwLock<Arc<Pass>>,
    closed: CancellationToken,
    refusals: Mutex<Refusals>,
    /// What this door's model calls may make the host hold, in KiB.
    pub(crate) held_kib: Arc<Semaphore>,
}

/// What was refused in the last minute.
#[derive(Default)]
struct Refusals {
    names: HashMap<String, Instant>,
    pushes: Vec<Instant>,
}

impl Refusals {
    fn forget_old(&mut self, now: Instant) {
        let recent = |at: &Instant| now.duration_since(*at) < REFUSAL_REPEAT;
        self.names.retain(|_, at| recent(at));
        self.pushes.retain(recent);
    }

    /// Whether the name was not told yet and there is room to tell it.
    fn is_news(&mut self, name: &str, now: Instant) -> bool {
        self.forget_old(now);
        if self.names.contains_key(name) || self.names.len() >= MAX_REFUSALS {
            return false;
        }
        self.names.insert(name.to_owned(), now);
        true
    }

    /// Whether there is room to tell one more push.
    fn has_room(&mut self, now: Instant) -> bool {
        self.forget_old(now);
        let room = self.pushes.len() < MAX_REFUSALS;
        if room {
            self.pushes.push(now);
        }
        room
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Door").field("session", &self.pass().session).finish_non_exhaustive()
    }
}

/// Opens a door at this path.
pub(crate) fn open(shared: Arc<Shared>, socket: &Path, pass: Pass) -> io::Result<DoorHandle> {
    let (listener, file) = bind(socket)?;
    let door = Arc::new(Door {
        shared,
        pass: RwLock::new(Arc::new(pass)),
        closed: CancellationToken::new(),
        refusals: Mutex::default(),
        held_kib: Arc::new(Semaphore::new(MAX_HELD_KIB)),
    });
    tokio::spawn(accept(Arc::clone(&door), UnixListener::from_std(listener)?));
    Ok(DoorHandle { door, socket: socket.to_owned(), file })
}

// A socket's address holds 107 bytes of path. Through the folder's descriptor every path fits.
fn bind(socket: &Path) -> io::Result<(StdListener, (u64, u64))> {
    let invalid =
        || io::Error::new(io::ErrorKind::InvalidInput, "the door's path has no folder or no name");
    let folder = fs::File::open(socket.parent().ok_or_else(invalid)?)?;
    let name = socket.file_name().ok_or_else(invalid)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    match fs::remove_file(&short) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = StdListener::bind(&short)?;
    listener.set_nonblocking(true)?;
    // The supervisor dials under an id of its own; the private folder above keeps all others out.
    fs::set_permissions(&short, fs::Permissions::from_mode(0o666))?;
    Ok((listener, file_identity(&short)?))
}

fn file_identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

async fn accept(door: Arc<Door>, listener: UnixListener) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = door.closed.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            // One try without waiting: whoever holds this many connections may also miss the reason.
            let _ = stream.try_write(&line(&refused("too many connections")));
            continue;
        };
        let door = Arc::clone(&door);
        tokio::spawn(async move {
            let closed = door.closed.clone();
            tokio::select! {
                () = door.serve(BufReader::new(stream)) => {}
                () = closed.cancelled() => {}
            }
            drop(slot);
        });
    }
}

impl Door {
    /// What the sandbox may do, as of now.
    pub(crate) fn pass(&self) -> Arc<Pass> {
        Arc::clone(&self.pass.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a refusal in the session's history, unless it was told a moment ago.
    pub(crate) async fn log_refusal(&self, name: &str, reason: &str) {
        let name: String = name.chars().filter(|c| !c.is_control()).take(253).collect();
        if self.refusals().is_news(&name, Instant::now()) {
            let event = EventBody::EgressRefused { name, reason: reason.to_owned() };
            self.shared.ledger.log(&self.pass().session, event).await;
        }
    }

    /// Keeps a refused push in the session's history, unless there were very many.
    pub(crate) async fn log_refused_push(&self, repository: &str, reason: &str) {
        if self.refusals().has_room(Instant::now()) {
            let reason = reason.chars().take(500).collect();
            let event = EventBody::PushRefused { repository: repository.to_owned(), reason };
            self.shared.ledger.log(&self.pass().session, event).await;
        }
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(self: Arc<Self>, mut stream: Stream) {
        let asked = match timeout(ASK_LIMIT, read_ask(&mut stream)).await {
            Ok(Ok(ask)) => ask,
            Ok(Err(error)) => {
                return tracing::debug!(%error, "a connection did not say what it is for");
            }
            Err(_) => return,
        };
        match asked {
            Ask::Lookup { name } => {
                let answer = match self.may_look_up(&name) {
                    true => Answer::Open,
                    false => {
                        self.log_refusal(&name, "the name is not in the policy").await;
                        refused("the name is not in the policy")
                    }
                };
                // Whoever asked may have gone; the answer was for nobody else.
                let _ = stream.write_all(&line(&answer)).await;
            }
            Ask::Connect { name, port } => self.connect(stream, &name, port).await,
        }
    }

    fn may_look_up(&self, name: &str) -> bool {
        is_own(name) || policy::allows_name(&self.pass().policy, name)
    }

    async fn connect(self: Arc<Self>, mut stream: Stream, name: &str, port: u16) {
        if is_own(name) && port == 80 {
            if stream.write_all(&line(&Answer::Open)).await.is_err() {
                return;
            }
            let model = policy::normal(name).as_deref() == Some(MODEL_NAME);
            return match model {
                true => {
                    http::serve(stream, |request| model::answer(Arc::clone(&self), request)).await
                }
                false => {
                    http::serve(stream, |request| git::answer(Arc::clone(&self), request)).await
                }
            };
        }
        let opened = match policy::allows(&self.pass().policy, name, port) {
            true => egress::connect(&self.shared.config, name, port).await,
            false => {
                Err(egress::Refused("the policy does not allow this name and port".to_owned()))
            }
        };
        match opened {
            Ok(upstream) => {
                if stream.write_all(&line(&Answer::Open)).await.is_ok()
                    && let Err(egress::Refused(reason)) =
                        egress::carry(stream, upstream, name, port).await
                {
                    self.log_refusal(name, &reason).await;
                }
            }
            Err(egress::Refused(reason)) => {
                self.log_refusal(name, &reason).await;
                // As above: nobody else waits for this line.
                let _ = stream.write_all(&line(&refused(&reason))).await;
            }
        }
    }
}

fn is_own(name: &str) -> bool {
    policy::normal(name).is_some_and(|name| name == MODEL_NAME || name == GIT_NAME)
}

async fn read_ask(stream: &mut Stream) -> io::Result<Ask> {
    let mut bytes = Vec::new();
    stream.take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut bytes).await?;
    if !bytes.ends_with(b"\n") {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the line does not end"));
    }
    serde_json::from_slice(&bytes).map_err(io::Error::from)
}

fn refused(reason: &str) -> Answer {
    // Escaping may make a character six bytes long; the line must stay below its limit.
    Answer::Refused { reason: reason.chars().take(150).collect() }
}

fn line(answer: &Answer) -> Vec<u8> {
    let mut line = serde_json::to_vec(answer).expect("an answer is plain strings");
    line.push(b'\n');
    line
}
