//! The engine's end of the zygote's socket: connects to the zygote of a home or starts one, sends a
//! request, and retries when the zygote dies before it answers.

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

use super::protocol::{Answer, Request};
use crate::{
    error::{AtPath, EngineError},
    fd_passing::{receive, send},
    home::{Config, Home},
    store::StoreKind,
};

// A zygote that dies during a request is replaced; three deaths in a row are a bug.
const ATTEMPTS: u32 = 3;

/// Sends a request to the zygote of this home, starting one if none runs.
pub(crate) fn ask(
    config: &Config,
    request: &Request,
    files: &[BorrowedFd<'_>],
) -> Result<Answer, EngineError> {
    ask_while(config, request, files, &mut || {})
}

/// As [`ask`], and runs `meanwhile` between request and answer, once per attempt.
pub(crate) fn ask_while(
    config: &Config,
    request: &Request,
    files: &[BorrowedFd<'_>],
    meanwhile: &mut dyn FnMut(),
) -> Result<Answer, EngineError> {
    // The store kind does not affect where the sockets are.
    let home = Home::new(config.home.clone(), StoreKind::Dir);
    for _ in 0..ATTEMPTS {
        let socket = match dial(&home) {
            Ok(socket) => socket,
            Err(_) => start(config, &home)?,
        };
        match exchange(&socket, request, files, meanwhile)? {
            Some(Answer::Outdated) => wait_for_exit(&socket),
            Some(answer) => return Ok(answer),
            None => {}
        }
    }
    Err(EngineError::Zygote {
        reason: format!("it died {ATTEMPTS} times while handling the same request"),
    })
}

/// Sends a request whose answer comes later, on the returned socket.
pub(crate) fn send_request(config: &Config, request: &Request) -> Result<OwnedFd, EngineError> {
    let home = Home::new(config.home.clone(), StoreKind::Dir);
    for _ in 0..ATTEMPTS {
        let socket = match dial(&home) {
            Ok(socket) => socket,
            Err(_) => start(config, &home)?,
        };
        match send(&socket, request, &[]) {
            Ok(()) => return Ok(socket),
            Err(error) if is_disconnected(&error) => {}
            Err(error) => return Err(unreachable_error(error)),
        }
    }
    Err(EngineError::Zygote {
        reason: format!("it died {ATTEMPTS} times while handling the same request"),
    })
}

/// `None` when the zygote died before it answered.
pub(crate) fn receive_answer(socket: &OwnedFd) -> Result<Option<Answer>, EngineError> {
    match receive(socket) {
        Err(error) if is_disconnected(&error) => Ok(None),
        result => Ok(result.map_err(unreachable_error)?.map(|(answer, _)| answer)),
    }
}

/// Sends a request only to a running zygote; `None` when there is none.
pub(crate) fn ask_if_running(
    home: &Home,
    request: &Request,
) -> Result<Option<Answer>, EngineError> {
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
        Err(error) if is_disconnected(&error) => return Ok(None),
        result => result.map_err(unreachable_error)?,
    }
    meanwhile();
    receive_answer(socket)
}

/// Waits until an exiting zygote has closed its socket: until then clients would find it again.
pub(crate) fn wait_for_exit(socket: &OwnedFd) {
    let timeout = Timespec { tv_sec: 2, tv_nsec: 0 };
    // The caller retries whether or not this timed out.
    let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
}

fn is_disconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

fn unreachable_error(error: io::Error) -> EngineError {
    EngineError::Zygote { reason: error.to_string() }
}

fn dial(home: &Home) -> io::Result<OwnedFd> {
    connect_in(&home.run(), "zygote.sock", SocketType::SEQPACKET)
}

/// Connects through `/proc/self/fd`, because a socket path is limited to 107 bytes.
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

/// Starts the zygote unless another process did meanwhile, and connects to it.
fn start(config: &Config, home: &Home) -> Result<OwnedFd, EngineError> {
    let path = home.run().join("zygote.start");
    let lock = OpenOptions::new().create(true).append(true).open(&path).at("open", &path)?;
    flock(&lock, FlockOperation::LockExclusive).at("lock", &path)?;
    if let Ok(socket) = dial(home) {
        return Ok(socket);
    }
    spawn(config, home)?;
    dial(home)
        .map_err(|error| EngineError::Zygote { reason: format!("it is not listening: {error}") })
}

/// Runs the zygote's command, which prints `ready` or an error and continues in the background.
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
    let mut output = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        let _ = stdout.read_to_string(&mut output);
    }
    let _ = child.wait();
    match output.trim() {
        "ready" => Ok(()),
        "" => Err(EngineError::Zygote {
            reason: format!("it exited without a message; see {}", log_path.display()),
        }),
        reason => Err(EngineError::Zygote { reason: reason.to_owned() }),
    }
}
