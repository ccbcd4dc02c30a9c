//! The protocol between the engine and its zygote: one JSON packet per request and one per answer,
//! with the descriptors a start needs attached. `Wait` is answered when the sandbox has ended.

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

use crate::{sandbox::Record, standby::StandbyCounts, volume::VolumeName};

/// A request to the zygote.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Start the recorded sandbox. Attached: the supervisor's file, the layers bottom first, the
    /// binds, the volumes.
    Start {
        record: Box<Record>,
        /// Paths of the layers; only shown in the plan.
        layers: Vec<PathBuf>,
        /// The host's `resolv.conf`, for sandboxes on the host's network.
        resolv_conf: String,
        /// The program that a new zygote would run.
        build: Option<BuildId>,
        /// The sandbox ran before and continues with its disk.
        restart: bool,
    },
    /// Answer when the sandbox has ended.
    Wait { id: SandboxId },
    /// Kill the sandbox and answer when all its processes are dead.
    Kill { id: SandboxId },
    /// Freeze until `Thaw`, or until `hold_millis` pass without another `Freeze`; default five
    /// seconds.
    Freeze { id: SandboxId, hold_millis: Option<u64> },
    /// End a freeze.
    Thaw { id: SandboxId },
    /// Unmount a volume if it is cached.
    Release { volume: VolumeName },
    /// Report standby counts. A client that sends only this does not keep the zygote alive.
    StandbyCounts,
    /// Liveness check. When it is answered, every sandbox's state is up to date on disk.
    Ping,
    /// Exit unless sandboxes or owners need the zygote.
    ExitIfIdle,
}

/// An answer of the zygote.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Pid 1 runs; `pid` is its pid on the host.
    Started { pid: u32 },
    /// The sandbox has ended.
    Ended { reason: String },
    /// Counts of standby processes.
    StandbyCounts(StandbyCounts),
    /// The request succeeded.
    Done,
    /// No such sandbox, or it is not running.
    Unknown,
    /// The request failed.
    Failed { reason: String },
    /// This zygote is another build and idle: it exits, and the client asks the next one.
    Outdated,
}

/// Identifies the file a program was started from; every upgrade changes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BuildId {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
}

impl BuildId {
    /// The program at this path; `None` if it cannot be read.
    pub(crate) fn of(program: &Path) -> Option<Self> {
        let about = std::fs::metadata(program).ok()?;
        Some(Self {
            file: (about.dev(), about.ino()),
            size: about.size(),
            modified: (about.mtime(), about.mtime_nsec()),
        })
    }
}

// The default send buffer is 208 KiB; a packet that does not fit fails with a clear error.
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
    // Peek the length first: many threads wait here, and none should hold the largest buffer.
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
    fn packet_carries_descriptors_and_closed_peer_reads_none() {
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
    fn packets_arrive_whole_and_oversized_ones_fail() {
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
