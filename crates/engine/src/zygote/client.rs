//! The engine's end of the zygote's socket: finds the zygote of a home or starts it, asks, and asks
//! again when a zygote died in between.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, Mode, OFlags, flock},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

use super::protocol::{Answer, Request, receive, send};
use crate::{
    error::{AtPath, EngineError},
    home::{Config, Home},
    store::StoreKind,
};

// A zygote that dies under a request is replaced; three in a row is no accident.
const ATTEMPTS: u32 = 3;

/// Asks the zygote of this home, starting it when there is none.
pub(crate) fn ask(
    config: &Config,
    request: &Request,
    files: &[BorrowedFd<'_>],
) -> Result<Answer, EngineError> {
    ask_and(config, request, files, &mut || {})
}

/// Asks, and does something else until the answer comes; again, should it have to ask again.
pub(crate) fn ask_and(
    config: &Config,
    request: &Request,
    files: &[BorrowedFd<'_>],
    meanwhile: &mut dyn FnMut(),
) -> Result<Answer, EngineError> {
    // Only its sockets matter here, which are in the same place in every home.
    let home = Home::new(config.home.clone(), StoreKind::Dir);
    for _ in 0..ATTEMPTS {
        let socket = match dial(&home) {
            Ok(socket) => socket,
            Err(_) => start(config, &home)?,
        };
        match exchange(&socket, request, files, meanwhile)? {
            Some(Answer::Outdated) => await_end(&socket),
            Some(answer) => return Ok(answer),
            None => {}
        }
    }
    Err(EngineError::Zygote { reason: format!("it died {ATTEMPTS} times over the same request") })
}

/// Asks what is answered later, on the socket.
pub(crate) fn begin(config: &Config, request: &Request) -> Result<OwnedFd, EngineError> {
    let home = Home::new(config.home.clone(), StoreKind::Dir);
    for _ in 0..ATTEMPTS {
        let socket = match dial(&home) {
            Ok(socket) => socket,
            Err(_) => start(config, &home)?,
        };
        match send(&socket, request, &[]) {
            Ok(()) => return Ok(socket),
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(unreachable(error)),
        }
    }
    Err(EngineError::Zygote { reason: format!("it died {ATTEMPTS} times over the same request") })
}

/// `None` when the zygote died before it answered.
pub(crate) fn answer(socket: &OwnedFd) -> Result<Option<Answer>, EngineError> {
    match receive(socket) {
        Err(error) if is_gone(&error) => Ok(None),
        result => Ok(result.map_err(unreachable)?.map(|(answer, _)| answer)),
    }
}

/// Asks only when there is a zygote; `None` when there is none.
pub(crate) fn ask_if_there(home: &Home, request: &Request) -> Result<Option<Answer>, EngineError> {
    match dial(home) {
        Ok(socket) => exchange(&socket, request, &[], &mut || {}),
        Err(_) => Ok(None),
    }
}

/// `None` when the zygote died before it answered.
fn exchange(
    socket: &OwnedFd,
    request: &Request,
    files: &[BorrowedFd<'_>],
    meanwhile: &mut dyn FnMut(),
) -> Result<Option<Answer>, EngineError> {
    match send(socket, request, files) {
        Err(error) if is_gone(&error) => return Ok(None),
        result => result.map_err(unreachable)?,
    }
    meanwhile();
    answer(socket)
}

/// Waits until a zygote that is going has gone: until then it would be found again.
pub(crate) fn await_end(socket: &OwnedFd) {
    let patience = Timespec { tv_sec: 2, tv_nsec: 0 };
    // Late or early, asking again is right.
    let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience));
}

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

fn unreachable(error: io::Error) -> EngineError {
    EngineError::Zygote { reason: error.to_string() }
}

fn dial(home: &Home) -> io::Result<OwnedFd> {
    connect_in(&home.run(), "zygote.sock", SocketType::SEQPACKET)
}

/// Connects to a socket by a short path, however long the folder's is: 107 bytes are the limit.
pub(crate) fn connect_in(folder: &Path, name: &str, kind: SocketType) -> io::Result<OwnedFd> {
    let folder = rustix::fs::open(
        folder,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))?;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// Starts the zygote, unless somebody else has meanwhile, and dials it.
fn start(config: &Config, home: &Home) -> Result<OwnedFd, EngineError> {
    let path = home.run().join("zygote.start");
    let lock = OpenOptions::new().create(true).append(true).open(&path).at("open", &path)?;
    flock(&lock, FlockOperation::LockExclusive).at("lock", &path)?;
    if let Ok(socket) = dial(home) {
        return Ok(socket);
    }
    spawn(config, home)?;
    dial(home)
        .map_err(|error| EngineError::Zygote { reason: format!("it does not listen: {error}") })
}

/// Runs the zygote's command, which answers `ready` or why not, and goes on in the background.
fn spawn(config: &Config, home: &Home) -> Result<(), EngineError> {
    let (program, arguments) = config.zygote.split_first().ok_or_else(|| EngineError::Invalid {
        reason: "no command for the zygote is configured".to_owned(),
    })?;
    let log_path = home.run().join("zygote.log");
    let log: File =
        OpenOptions::new().create(true).append(true).open(&log_path).at("open", &log_path)?;
    let mut child = Command::new(program)
        .args(arguments)
        .arg(home.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .at("run", program)?;
    let mut said = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        let _ = stdout.read_to_string(&mut said);
    }
    let _ = child.wait();
    match said.trim() {
        "ready" => Ok(()),
        "" => Err(EngineError::Zygote {
            reason: format!("it said nothing; see {}", log_path.display()),
        }),
        reason => Err(EngineError::Zygote { reason: reason.to_owned() }),
    }
}
