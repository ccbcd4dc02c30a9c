//! Packets over a Unix socket: one JSON message each, with descriptors attached.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};

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
        send(&left, &"ping", &[left.as_fd(), right.as_fd()]).unwrap();
        let (request, files) = receive::<String>(&right).unwrap().unwrap();
        assert_eq!(request, "ping");
        assert_eq!(files.len(), 2);
        drop((left, files));
        assert!(receive::<String>(&right).unwrap().is_none());
    }

    #[test]
    fn packets_arrive_whole_and_oversized_ones_fail() {
        let (left, right) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        for length in [1, 4096, MAX_PACKET_BYTES - 100] {
            send(&left, &"x".repeat(length), &[]).unwrap();
            let (answer, _) = receive::<String>(&right).unwrap().unwrap();
            assert_eq!(answer.len(), length);
        }
        send_with(&left, &[b' '; MAX_PACKET_BYTES + 1], &[]).unwrap();
        assert_eq!(receive::<String>(&right).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
