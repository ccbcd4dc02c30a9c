//! Messages with file descriptors over a Unix stream socket: four bytes of length with the
//! descriptors attached, then the message.

use std::{
    io::{self, IoSlice, IoSliceMut, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

// A launch on a cgroup v1 host has about twenty; the kernel allows 253.
const MAX_DESCRIPTORS: usize = 64;

// Arguments and environment take at most 2 MiB (the kernel's limit for exec), escaped as JSON.
const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

/// One `sendmsg`: sends as many `bytes` as fit, with all `descriptors`.
pub(crate) fn send_some(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(sent)
}

/// One `recvmsg`: bytes into `buffer`, descriptors close-on-exec. Zero bytes is the end.
pub(crate) fn receive_some(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut into = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(&socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((received.bytes, descriptors))
}

/// The message with its length in front.
pub(crate) fn frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("messages are far below 4 GiB");
    [&length.to_be_bytes()[..], message].concat()
}

/// Reads one message; `None` at the end of the stream.
pub(crate) fn receive(socket: &UnixStream) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut head = [0u8; 4];
    let (count, descriptors) = receive_some(socket, &mut head)?;
    if count == 0 {
        return Ok(None);
    }
    let mut reader = socket;
    reader.read_exact(&mut head[count..])?;
    let length = u32::from_be_bytes(head) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    let mut message = vec![0u8; length];
    reader.read_exact(&mut message)?;
    Ok(Some((message, descriptors)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn message_arrives_with_its_descriptors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut pipe_out, pipe_in) = std::io::pipe().unwrap();
        let bytes = frame(b"hello");
        let sent = send_some(&ours, &bytes[..2], &[pipe_in.as_fd()]).unwrap();
        (&ours).write_all(&bytes[sent..]).unwrap();
        let (message, mut descriptors) = receive(&theirs).unwrap().unwrap();
        assert_eq!(message, b"hello");
        assert_eq!(descriptors.len(), 1);
        std::fs::File::from(descriptors.remove(0)).write_all(b"x").unwrap();
        drop(pipe_in);
        let mut text = String::new();
        pipe_out.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }
}
