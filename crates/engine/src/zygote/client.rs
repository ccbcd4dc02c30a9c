//! The engine's end of the zygote's socket: connects to the zygote of a home or starts one, sends a
//! request, and retries when the zygote dies before it answers.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

use super::protocol::{Answer, Request};
use crate::{
    error::{AtPath, EngineError},
    fd_passing::{receive, send},
    file_lock,
    home::{Config, Home},
    store::StoreKind,
    syscall,
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
    for _ in 0..ATTEMPTS {
        let socket = dial_or_start(config)?;
        match exchange(&socket, request, files, meanwhile)? {
            Some(Answer::Outdated) => wait_for_exit(&socket),
            Some(answer) => return Ok(answer),
            None => {}
        }
    }
    Err(died_repeatedly())
}

/// Sends a request whose answer comes later, on the returned socket.
pub(crate) fn send_request(config: &Config, request: &Request) -> Result<OwnedFd, EngineError> {
    for _ in 0..ATTEMPTS {
        let socket = dial_or_start(config)?;
        match send(&socket, request, &[]) {
            Err(error) if is_disconnected(&error) => {}
            result => return result.map(|()| socket).map_err(unreachable_error),
        }
    }
    Err(died_repeatedly())
}

fn died_repeatedly() -> EngineError {
    let reason = format!("it died {ATTEMPTS} times while handling the same request");
    EngineError::Zygote(reason)
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
    // The caller retries whether or not this timed out.
    let _ = syscall::is_readable(socket, Duration::from_secs(2));
}

fn is_disconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

fn unreachable_error(error: io::Error) -> EngineError {
    EngineError::Zygote(error.to_string())
}

fn dial(home: &Home) -> io::Result<OwnedFd> {
    connect_in(&home.run(), "zygote.sock", SocketType::SEQPACKET)
}

/// Connects through `/proc/self/fd`, because a socket path is limited to 107 bytes.
pub(crate) fn connect_in(folder: &Path, name: &str, kind: SocketType) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))?;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// Connects to the zygote, and starts it unless another process did.
fn dial_or_start(config: &Config) -> Result<OwnedFd, EngineError> {
    // The store kind does not affect where the sockets are.
    let home = &Home::new(config.home.clone(), StoreKind::Dir);
    if let Ok(socket) = dial(home) {
        return Ok(socket);
    }
    let _lock = file_lock::lock(&home.run().join("zygote.start"), FlockOperation::LockExclusive)?;
    if let Ok(socket) = dial(home) {
        return Ok(socket);
    }
    spawn(config, home)?;
    dial(home).map_err(|error| EngineError::Zygote(format!("it is not listening: {error}")))
}

/// Runs the zygote's command, which prints `ready` or an error and continues in the background.
fn spawn(config: &Config, home: &Home) -> Result<(), EngineError> {
    let (program, arguments) = config.zygote.split_first().ok_or_else(|| {
        EngineError::Invalid("no command for the zygote is configured".to_owned())
    })?;
    let log_path = home.run().join("zygote.log");
    let log: File =
        OpenOptions::new().create(true).append(true).open(&log_path).at("open", &log_path)?;
    let mut child = Command::new(program)
        .args(arguments)
        .arg(home.path())
        // The zygote outlives this process, whose environment may contain secrets.
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
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
    let reason = match output.trim() {
        "ready" => return Ok(()),
        "" => format!("it exited without a message; see {}", log_path.display()),
        reason => reason.to_owned(),
    };
    Err(EngineError::Zygote(reason))
}
