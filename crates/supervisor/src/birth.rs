//! Receives what the supervisor is born with, on standard input: its launch, and before it perhaps a
//! cradle, with what is ready before anybody knows which sandbox this is. Does nothing with it.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
};

use harvest_proto::launch::{Cradle, Descriptor, Launch};
use rustix::{
    fs::{Mode, OFlags},
    net::{Shutdown, shutdown},
};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::{io::Interest, net::UnixStream};

use crate::{log, passing};

/// Why a supervisor cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BirthError {
    #[error("cannot read the launch message: {0}")]
    Read(#[from] io::Error),
    #[error("the launch message cannot be understood: {0}")]
    Message(#[from] serde_json::Error),
    #[error("the launch message names {named} descriptors and brings {brought}")]
    Count { named: usize, brought: usize },
    #[error("the launch message brings no bridge")]
    NoBridge,
    #[error("nobody launches it")]
    NotLaunched,
}

/// Descriptors, by what they are.
#[derive(Default)]
pub(crate) struct Inheritance(Vec<(Descriptor, OwnedFd)>);

impl Inheritance {
    /// Takes the first descriptor of this kind.
    pub(crate) fn take(&mut self, kind: Descriptor) -> Option<OwnedFd> {
        let index = self.0.iter().position(|(is, _)| *is == kind)?;
        Some(self.0.remove(index).1)
    }

    /// Takes every descriptor of this kind.
    pub(crate) fn take_all(&mut self, kind: Descriptor) -> Vec<OwnedFd> {
        std::iter::from_fn(|| self.take(kind)).collect()
    }

    fn add(&mut self, names: &[Descriptor], brought: Vec<OwnedFd>) -> Result<(), BirthError> {
        if names.len() != brought.len() {
            return Err(BirthError::Count { named: names.len(), brought: brought.len() });
        }
        self.0.extend(names.iter().copied().zip(brought));
        Ok(())
    }
}

/// A supervisor that may not know yet which sandbox it is pid 1 of.
pub(crate) struct Birth {
    pub(crate) inheritance: Inheritance,
    socket: OwnedFd,
    launch: Option<Launch>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum First {
    Launch(Launch),
    Cradle(Cradle),
}

impl Birth {
    /// Reads the first message and puts `/dev/null` in the place of standard input.
    pub(crate) fn receive() -> Result<Self, BirthError> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let (first, brought) = read_message(|buffer| passing::receive_some(&socket, buffer))?;
        let mut inheritance = Inheritance::default();
        let launch = match first {
            First::Launch(launch) => {
                inheritance.add(&launch.descriptors, brought)?;
                Some(launch)
            }
            First::Cradle(Cradle { cradle }) => {
                inheritance.add(&cradle, brought)?;
                None
            }
        };
        let null = match inheritance.take(Descriptor::Null) {
            Some(null) => null,
            None => rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(io::Error::from)?,
        };
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
        Ok(Self { inheritance, socket, launch })
    }

    /// What to call when no process is being started any more: the engine may give everybody a new root
    /// then. One that is started in that moment would keep the old one.
    pub(crate) fn settles(&self) -> Result<impl FnOnce() + use<>, BirthError> {
        let socket = match self.launch {
            Some(_) => None,
            None => Some(self.socket.try_clone()?),
        };
        // Not by a message: an engine that does not know of it would leave it unread.
        Ok(move || {
            if let Some(error) = socket.and_then(|socket| shutdown(socket, Shutdown::Write).err()) {
                log::line(format_args!("cannot say that it has settled: {error}"));
            }
        })
    }

    /// Waits for the launch, unless it has come, and goes over to its log.
    pub(crate) async fn launched(self) -> Result<(Launch, Inheritance), BirthError> {
        let Self { mut inheritance, socket, launch } = self;
        let launch = match launch {
            Some(launch) => launch,
            None => {
                let (launch, brought) = await_launch(socket).await?;
                inheritance.add(&launch.descriptors, brought)?;
                launch
            }
        };
        if let Some(log) = inheritance.take(Descriptor::Log) {
            rustix::stdio::dup2_stdout(&log).map_err(io::Error::from)?;
            rustix::stdio::dup2_stderr(&log).map_err(io::Error::from)?;
        }
        Ok((launch, inheritance))
    }
}

// After a cradle the socket keeps messages apart, so one read is one launch.
async fn await_launch(socket: OwnedFd) -> Result<(Launch, Vec<OwnedFd>), BirthError> {
    let socket = StdUnixStream::from(socket);
    socket.set_nonblocking(true)?;
    let socket = UnixStream::from_std(socket)?;
    let mut buffer = vec![0u8; MESSAGE_BYTES];
    let receive = || passing::receive_some(&socket, &mut buffer);
    let (count, brought) = socket.async_io(Interest::READABLE, receive).await?;
    // Who would launch it is gone, and with them the zygote. No signal for that: it would have to be
    // undone before anybody is told that the sandbox runs, or it would die with the zygote.
    if count == 0 {
        return Err(BirthError::NotLaunched);
    }
    Ok((serde_json::from_slice(&buffer[..count])?, brought))
}

// The engine's packets are smaller.
const MESSAGE_BYTES: usize = 256 * 1024;

// On a stream socket a long message may come in pieces: read on until the JSON is complete.
fn read_message<T: DeserializeOwned>(
    mut receive: impl FnMut(&mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)>,
) -> Result<(T, Vec<OwnedFd>), BirthError> {
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    let mut buffer = vec![0u8; MESSAGE_BYTES];
    loop {
        let (count, more) = receive(&mut buffer)?;
        descriptors.extend(more);
        text.extend_from_slice(&buffer[..count]);
        match serde_json::from_slice::<serde::de::IgnoredAny>(&text) {
            Err(error) if error.is_eof() && count > 0 => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok((serde_json::from_slice(&text)?, descriptors)),
        }
    }
}
