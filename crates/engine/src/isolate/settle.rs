//! Waits for pid 1 to start no more processes. `pivot_root` gives the new root to every process the
//! kernel lists, and one that is being forked in that moment is not on the list yet: it would keep
//! the zygote's root, and so would every command below it.

use std::{io, os::fd::OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Doing, StepError};

// A burst of a hundred sandboxes takes a second or two on two busy processors. An overloaded host
// needs longer, and a late start is better than a failed one.
const SETTLE_TIMEOUT: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// Waits until the supervisor has shut its end of the socket down. Fails after the timeout: a new
/// root would then miss processes that are being forked.
pub(super) fn wait(launcher: &OwnedFd) -> Result<(), StepError> {
    wait_for(launcher, SETTLE_TIMEOUT)
}

fn wait_for(launcher: &OwnedFd, timeout: Timespec) -> Result<(), StepError> {
    let mut polled = [PollFd::new(launcher, PollFlags::IN | PollFlags::RDHUP)];
    let settled = rustix::io::retry_on_intr(|| poll(&mut polled, Some(&timeout)));
    let settled = match settled {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        settled => settled.map(drop).map_err(io::Error::from),
    };
    settled.doing(|| "wait for the supervisor to finish its start-up forks")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send,
        shutdown, socketpair,
    };

    #[test]
    fn start_fails_until_the_supervisor_has_settled() {
        let flags = SocketFlags::CLOEXEC;
        let (inside, launcher) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        let error = wait_for(&launcher, no_wait).unwrap_err();
        assert!(error.line().ends_with("timed out"), "{}", error.line());
        shutdown(&inside, Shutdown::Write).unwrap();
        wait_for(&launcher, no_wait).unwrap();
        send(&launcher, b"launch", SendFlags::NOSIGNAL).unwrap();
        drop(launcher);
        let mut received = [0; 16];
        assert_eq!(recv(&inside, &mut received, RecvFlags::empty()).unwrap().0, 6);
    }
}
