//! Receives the launch message and its descriptors on standard input. A standby supervisor first
//! gets an early launch, before it is known which sandbox it will serve.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
};

use harvest_proto::launch::{Descriptor, EarlyLaunch, Launch};
use rustix::{
    fs::{Mode, OFlags},
    net::{Shutdown, shutdown},
};
use serde::Deserialize;
use tokio::{io::Interest, net::UnixStream};

use crate::{fd_passing, log};

/// Why a supervisor cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("cannot read the launch message: {0}")]
    Read(#[from] io::Error),
    #[error("cannot parse the launch message: {0}")]
    Message(#[from] serde_json::Error),
    #[error("the launch message names {named} descriptors but carries {received}")]
    DescriptorCount { named: usize, received: usize },
    #[error("the launch message has no bridge descriptor")]
    NoBridge,
    #[error("the launching process closed the socket")]
    NotLaunched,
}

/// Inherited descriptors by kind.
#[derive(Default)]
pub(crate) struct InheritedFds(Vec<(Descriptor, OwnedFd)>);

impl InheritedFds {
    /// Takes the first descriptor of this kind.
    pub(crate) fn take(&mut self, kind: Descriptor) -> Option<OwnedFd> {
        let index = self.0.iter().position(|(other, _)| *other == kind)?;
        Some(self.0.remove(index).1)
    }

    /// Takes every descriptor of this kind.
    pub(crate) fn take_all(&mut self, kind: Descriptor) -> Vec<OwnedFd> {
        std::iter::from_fn(|| self.take(kind)).collect()
    }

    fn add(&mut self, names: &[Descriptor], received: Vec<OwnedFd>) -> Result<(), LaunchError> {
        if names.len() != received.len() {
            let (named, received) = (names.len(), received.len());
            return Err(LaunchError::DescriptorCount { named, received });
        }
        self.0.extend(names.iter().copied().zip(received));
        Ok(())
    }
}

/// A supervisor that may not have received its launch yet.
pub(crate) struct PendingLaunch {
    pub(crate) inherited: InheritedFds,
    socket: OwnedFd,
    launch: Option<Launch>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FirstMessage {
    Launch(Box<Launch>),
    EarlyLaunch(EarlyLaunch),
}

impl PendingLaunch {
    /// Reads the first message and replaces standard input with `/dev/null`.
    pub(crate) fn receive() -> Result<Self, LaunchError> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let (first, received) = read_message(&socket)?;
        let mut inherited = InheritedFds::default();
        let launch = match first {
            FirstMessage::Launch(launch) => {
                inherited.add(&launch.descriptors, received)?;
                Some(*launch)
            }
            FirstMessage::EarlyLaunch(EarlyLaunch { early_descriptors }) => {
                inherited.add(&early_descriptors, received)?;
                None
            }
        };
        let null = match inherited.take(Descriptor::DevNull) {
            Some(null) => null,
            None => rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(io::Error::from)?,
        };
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
        Ok(Self { inherited, socket, launch })
    }

    /// Returns a callback for the moment when no process is being started any more. The engine may
    /// then pivot the root of all processes; one being forked at that moment would keep the old
    /// root.
    pub(crate) fn on_settled(&self) -> Result<impl FnOnce() + use<>, LaunchError> {
        let early = self.launch.is_none();
        let socket = early.then(|| self.socket.try_clone()).transpose()?;
        // The engine polls for the shutdown of this direction.
        Ok(move || {
            if let Some(error) = socket.and_then(|socket| shutdown(socket, Shutdown::Write).err()) {
                log::line(format_args!("cannot report that startup has settled: {error}"));
            }
        })
    }

    /// Waits for the launch if it has not arrived, and redirects stdout and stderr to its log.
    pub(crate) async fn wait_for_launch(self) -> Result<(Launch, InheritedFds), LaunchError> {
        let Self { mut inherited, socket, launch } = self;
        let launch = match launch {
            Some(launch) => launch,
            None => {
                let (launch, received) = read_launch(socket).await?;
                inherited.add(&launch.descriptors, received)?;
                launch
            }
        };
        if let Some(log) = inherited.take(Descriptor::Log) {
            rustix::stdio::dup2_stdout(&log).map_err(io::Error::from)?;
            rustix::stdio::dup2_stderr(&log).map_err(io::Error::from)?;
        }
        Ok((launch, inherited))
    }
}

// After an early launch the socket preserves message boundaries, so one read is one launch.
async fn read_launch(socket: OwnedFd) -> Result<(Launch, Vec<OwnedFd>), LaunchError> {
    let socket = StdUnixStream::from(socket);
    socket.set_nonblocking(true)?;
    let socket = UnixStream::from_std(socket)?;
    let mut buffer = vec![0u8; MESSAGE_BYTES];
    let receive = || fd_passing::receive_some(&socket, &mut buffer);
    let (count, received) = socket.async_io(Interest::READABLE, receive).await?;
    // The zygote has exited. A parent-death signal cannot be used instead: a running sandbox must
    // survive the zygote.
    if count == 0 {
        return Err(LaunchError::NotLaunched);
    }
    Ok((serde_json::from_slice(&buffer[..count])?, received))
}

// Larger than any packet of the engine.
const MESSAGE_BYTES: usize = 256 * 1024;

// A stream socket may split a long message: read until the JSON is complete.
fn read_message(socket: &OwnedFd) -> Result<(FirstMessage, Vec<OwnedFd>), LaunchError> {
    let (mut text, mut descriptors) = (Vec::new(), Vec::new());
    let mut buffer = vec![0u8; MESSAGE_BYTES];
    loop {
        let (count, more) = fd_passing::receive_some(socket, &mut buffer)?;
        descriptors.extend(more);
        text.extend_from_slice(&buffer[..count]);
        match serde_json::from_slice::<serde::de::IgnoredAny>(&text) {
            Err(error) if error.is_eof() && count > 0 => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok((serde_json::from_slice(&text)?, descriptors)),
        }
    }
}
