//! Waits for pid 1 to start no more processes. `pivot_root` gives the new root to every process the
//! kernel lists, and one that is being forked in that moment is not on the list yet: it would keep
//! the zygote's root, and so would every command below it.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Doing, StepError};

// A burst of a hundred sandboxes takes a second or two on two busy processors.
const SETTLE_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Waits until the supervisor has shut its end of the socket down. After the timeout the steps
/// continue: by then the supervisor has long finished its start-up forks.
pub(super) fn wait(launcher: &OwnedFd) -> Result<(), StepError> {
    has_settled(launcher, SETTLE_TIMEOUT).map(drop)
}

fn has_settled(launcher: &OwnedFd, timeout: Timespec) -> Result<bool, StepError> {
    let mut polled = [PollFd::new(launcher, PollFlags::IN | PollFlags::RDHUP)];
    let settled = rustix::io::retry_on_intr(|| poll(&mut polled, Some(&timeout)));
    settled.map(|settled| settled > 0).doing(|| "wait for pid 1 to settle".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send,
        shutdown, socketpair,
    };

    #[test]
    fn settled_supervisor_can_still_be_launched() {
        let flags = SocketFlags::CLOEXEC;
        let (inside, launcher) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert!(!has_settled(&launcher, no_wait).unwrap());
        shutdown(&inside, Shutdown::Write).unwrap();
        assert!(has_settled(&launcher, no_wait).unwrap());
        send(&launcher, b"launch", SendFlags::NOSIGNAL).unwrap();
        drop(launcher);
        let mut received = [0; 16];
        assert_eq!(recv(&inside, &mut received, RecvFlags::empty()).unwrap().0, 6);
    }
}
