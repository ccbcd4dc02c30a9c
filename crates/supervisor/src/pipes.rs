//! The pipes of commands: creates them, reads what an exited command left, and discards what its
//! descendants still write.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;

/// The supervisor's ends of a command's pipes.
pub(crate) struct Pipes {
    pub(crate) stdin: Option<pipe::Sender>,
    pub(crate) stdout: pipe::Receiver,
    pub(crate) stderr: pipe::Receiver,
}

/// Creates the pipes of a command of this user: the supervisor's ends and the command's.
pub(crate) fn pipes(
    uid: u32,
    gid: u32,
    with_stdin: bool,
) -> std::io::Result<(Pipes, [OwnedFd; 3])> {
    let (stdin, their_stdin) = if with_stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(pipe::Sender::from_owned_fd(ours)?), theirs)
    } else {
        (None, dev_null()?)
    };
    let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    for pipe in
        [&their_stdin, &their_stdout, &their_stderr].into_iter().skip(usize::from(!with_stdin))
    {
        // Opening /dev/stdout by name checks the pipe's owner.
        let _only_by_path = std::os::unix::fs::fchown(pipe, Some(uid), Some(gid));
    }
    let ours = Pipes {
        stdin,
        stdout: pipe::Receiver::from_owned_fd(stdout)?,
        stderr: pipe::Receiver::from_owned_fd(stderr)?,
    };
    Ok((ours, [their_stdin, their_stdout, their_stderr]))
}

/// The inherited `/dev/null`: root inside may have replaced the file.
pub(crate) fn dev_null() -> std::io::Result<OwnedFd> {
    std::io::stdin().as_fd().try_clone_to_owned()
}

// The capacity of a pipe (`fs.pipe-max-size`): after its last read an exited command cannot have
// left more. Anything beyond comes from its descendants.
pub(crate) const MAX_PIPE_BYTES: usize = 1 << 20;

/// Reads what an exited writer left in a pipe, and no more.
pub(crate) fn read_rest(receiver: &pipe::Receiver, mut take: impl FnMut(&[u8])) {
    let (mut buffer, mut left) = ([0u8; 8192], MAX_PIPE_BYTES);
    while left > 0
        && let Ok(count @ 1..) = read_now(receiver, &mut buffer, true)
    {
        take(&buffer[..count]);
        left = left.saturating_sub(count);
    }
}

/// Reads until the other end is closed.
pub(crate) async fn read_all(receiver: &pipe::Receiver, mut take: impl FnMut(&[u8])) {
    let mut buffer = [0u8; 4096];
    while receiver.readable().await.is_ok() {
        match receiver.try_read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                take(&buffer[..count]);
                // A pipe that never runs empty would starve the other tasks.
                tokio::task::yield_now().await;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// Reads until it is cancelled.
pub(crate) async fn read_on<T>(receiver: &pipe::Receiver, take: impl FnMut(&[u8])) -> T {
    read_all(receiver, take).await;
    std::future::pending().await
}

/// Reads without waiting. With `last` it bypasses the runtime, whose readiness state may lag
/// behind.
pub(crate) fn read_now(
    receiver: &pipe::Receiver,
    buffer: &mut [u8],
    last: bool,
) -> std::io::Result<usize> {
    if last { Ok(rustix::io::read(receiver, buffer)?) } else { receiver.try_read(buffer) }
}

// Limits discarded output to 13 MB per second: a faster writer blocks instead of keeping pid 1
// busy, whose CPU time the sandbox's limits do not cover.
const DISCARD_BYTES: usize = 64 * 1024;
const DISCARD_INTERVAL: Duration = Duration::from_millis(5);

/// Reads and discards until the other end is closed.
pub(crate) async fn discard_output(receiver: pipe::Receiver) {
    loop {
        let read = receiver.try_read(&mut vec![0u8; DISCARD_BYTES]);
        match read {
            Ok(0) => return,
            Ok(_) => tokio::time::sleep(DISCARD_INTERVAL).await,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if receiver.readable().await.is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_output_is_read_up_to_pipe_capacity() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let receiver = pipe::Receiver::from_owned_fd(ours).unwrap();
        let refill = |bytes: usize| rustix::io::write(&theirs, &vec![0; bytes]).unwrap();
        refill(4096);
        let mut read = 0;
        // The writer is as fast as the reader: the pipe is never empty.
        read_rest(&receiver, |bytes| {
            read += bytes.len();
            assert!(read <= MAX_PIPE_BYTES + 8192, "reading is unbounded");
            refill(bytes.len());
        });
        assert!(read >= MAX_PIPE_BYTES);
    }
}
