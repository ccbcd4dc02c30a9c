//! Receives what the supervisor is born with: one message on standard input. Does nothing with it.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use harvest_proto::launch::{Descriptor, Launch};
use rustix::fs::{Mode, OFlags};

use crate::passing;

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
}

/// The launch and its descriptors, by what they are.
pub(crate) struct Inheritance {
    pub(crate) launch: Launch,
    descriptors: Vec<(Descriptor, OwnedFd)>,
}

impl Inheritance {
    /// Takes the first descriptor of this kind.
    pub(crate) fn take(&mut self, kind: Descriptor) -> Option<OwnedFd> {
        let index = self.descriptors.iter().position(|(is, _)| *is == kind)?;
        Some(self.descriptors.remove(index).1)
    }

    /// Takes every descriptor of this kind.
    pub(crate) fn take_all(&mut self, kind: Descriptor) -> Vec<OwnedFd> {
        std::iter::from_fn(|| self.take(kind)).collect()
    }
}

/// Reads the launch message and puts `/dev/null` in the place of standard input.
pub(crate) fn receive() -> Result<Inheritance, BirthError> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let (text, descriptors) = read_message(&socket)?;
    let launch: Launch = serde_json::from_slice(&text)?;
    if launch.descriptors.len() != descriptors.len() {
        return Err(BirthError::Count { named: launch.descriptors.len(), brought: descriptors.len() });
    }
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(io::Error::from)?;
    rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
    let descriptors = launch.descriptors.iter().copied().zip(descriptors).collect();
    Ok(Inheritance { launch, descriptors })
}

// On a stream socket a long message may come in pieces: read on until the JSON is complete.
fn read_message(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), BirthError> {
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    let mut buffer = vec![0u8; 256 * 1024];
    loop {
        let (count, more) = passing::receive_some(socket, &mut buffer)?;
        descriptors.extend(more);
        text.extend_from_slice(&buffer[..count]);
        match serde_json::from_slice::<serde::de::IgnoredAny>(&text) {
            Err(error) if error.is_eof() && count > 0 => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok((text, descriptors)),
        }
    }
}
