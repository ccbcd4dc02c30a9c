//! What the engine and its zygote say to each other: one packet of JSON each way per request, the
//! descriptors a start needs attached. A `Wait` is answered when the sandbox has ended.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use harvest_proto::SandboxId;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{sandbox::Record, seeds::SeedCounts, volume::VolumeName};

/// What the engine asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Start what is recorded. Attached: the supervisor's file, the layers bottom first, the binds, the
    /// volumes.
    Start {
        record: Box<Record>,
        /// Where the layers are, for whoever reads the plan.
        layers: Vec<PathBuf>,
        /// The host's, for sandboxes that share its network.
        resolv_conf: String,
        /// The program a zygote would be started from now.
        #[serde(default)]
        build: Option<Build>,
        /// It has run before and goes on with the disk it left.
        #[serde(default)]
        again: bool,
    },
    /// Answer when it has ended.
    Wait { id: SandboxId },
    /// Kill it and answer when all of it is dead.
    Kill { id: SandboxId },
    /// Stand still until `Thaw`, or until nobody has asked again for so long; five seconds when absent.
    Freeze {
        id: SandboxId,
        #[serde(default)]
        hold_millis: Option<u64>,
    },
    /// Go on.
    Thaw { id: SandboxId },
    /// Let go of a volume, if you hold it.
    Release { volume: VolumeName },
    /// How many seeds do you have? Who asks only this keeps no zygote from going.
    Seeds,
    /// Are you there? By the time of the answer every sandbox's state is written down.
    Ping,
    /// Exit unless there is something to look after.
    Rest,
}

/// The zygote's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Pid 1 runs, under this pid of the host.
    Started { pid: u32 },
    /// It has ended.
    Ended { reason: String },
    /// So many.
    Seeds(SeedCounts),
    /// Done.
    Done,
    /// No such sandbox, or it does not run.
    Unknown,
    /// It could not be done.
    Failed { reason: String },
    /// This zygote is of another build and has nothing to look after: it goes, ask the next one.
    Outdated,
}

/// Which file a program was started from: another one after every upgrade.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Build {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
}

impl Build {
    /// The program at this path; `None` where it cannot be looked at.
    pub(crate) fn of(program: &Path) -> Option<Self> {
        let about = std::fs::metadata(program).ok()?;
        Some(Self {
            file: (about.dev(), about.ino()),
            size: about.size(),
            modified: (about.mtime(), about.mtime_nsec()),
        })
    }
}

// A socket's default send buffer is 208 KiB; a packet that does not fit fails with a clear error.
pub(crate) const MAX_PACKET_BYTES: usize = 192 * 1024;

// The kernel's limit per message, SCM_MAX_FD.
const MAX_DESCRIPTORS: usize = 253;

/// Sends one packet.
pub(crate) fn send<T: Serialize>(
    socket: impl AsFd,
    message: &T,
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_PACKET_BYTES || files.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::ArgumentListTooLong.into());
    }
    send_with(socket, &bytes, files)
}

/// Sends one message with descriptors attached.
pub(crate) fn send_with(
    socket: impl AsFd,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one packet; `None` when the other end is gone.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    // Whoever waits here holds no room for the largest packet there is: many wait at once.
    let (_, length) = rustix::io::retry_on_intr(|| {
        recv(socket.as_fd(), &mut [0u8; 0], RecvFlags::PEEK | RecvFlags::TRUNC)
    })?;
    let mut bytes = vec![0u8; length.min(MAX_PACKET_BYTES)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket.as_fd(), &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..received.bytes])?, files)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn a_packet_keeps_its_descriptors_and_an_end_is_told_from_a_packet() {
        let (left, right) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        send(&left, &Request::Ping, &[left.as_fd(), right.as_fd()]).unwrap();
        let (request, files) = receive::<Request>(&right).unwrap().unwrap();
        assert!(matches!(request, Request::Ping));
        assert_eq!(files.len(), 2);
        drop((left, files));
        assert!(receive::<Request>(&right).unwrap().is_none());
    }

    #[test]
    fn a_packet_of_any_length_comes_whole_and_one_that_is_too_long_not_at_all() {
        let (left, right) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        for length in [1, 4096, MAX_PACKET_BYTES - 100] {
            send(&left, &Answer::Failed { reason: "x".repeat(length) }, &[]).unwrap();
            let (answer, _) = receive::<Answer>(&right).unwrap().unwrap();
            assert!(matches!(answer, Answer::Failed { reason } if reason.len() == length));
        }
        send_with(&left, &[b' '; MAX_PACKET_BYTES + 1], &[]).unwrap();
        assert_eq!(receive::<Answer>(&right).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
