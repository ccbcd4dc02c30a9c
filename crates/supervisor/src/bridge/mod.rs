//! The server side of the bridge: accepts connections. One of them owns the session.

mod client;

use std::{
    cell::{Cell, RefCell},
    io,
    os::{fd::OwnedFd, unix::net::UnixListener as StdUnixListener},
    rc::Rc,
    time::Duration,
};

use harvest_proto::bridge::Status;
use tokio::{net::UnixListener, sync::Notify};

use crate::{boot::BootRunner, log, outbox::Outbox, sandbox::Sandbox, turn::Turns};

// Delay after a failed accept (too many open files).
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// What requests on the bridge reach.
pub(crate) struct Bridge {
    pub(crate) sandbox: Rc<Sandbox>,
    outbox: Rc<Outbox>,
    pub(crate) turns: Rc<Turns>,
    boot: Rc<BootRunner>,
    ownership: Ownership,
    /// Notified by the owner's `Shutdown` request.
    pub(crate) shutdown: Rc<Notify>,
}

impl Bridge {
    pub(crate) fn new(sandbox: Sandbox) -> Rc<Self> {
        let (sandbox, outbox, turns) = (Rc::new(sandbox), Outbox::new(), Rc::<Turns>::default());
        let boot = BootRunner::new(Rc::clone(&sandbox), Rc::clone(&outbox), Rc::clone(&turns));
        Rc::new(Self {
            sandbox,
            outbox,
            turns,
            boot,
            ownership: Ownership::default(),
            shutdown: Rc::default(),
        })
    }

    /// Accepts connections.
    pub(crate) async fn serve(self: &Rc<Self>, listener: UnixListener) {
        let mut failing = false;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    failing = false;
                    tokio::task::spawn_local(client::serve(Rc::clone(self), stream));
                }
                Err(error) => {
                    if !failing {
                        log::line(format_args!("cannot accept on the bridge: {error}"));
                    }
                    failing = true;
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    fn status(&self) -> Status {
        Status {
            phase: self.boot.phase(),
            failed: self.boot.has_failed(),
            prompts: self.turns.seen(),
            last_event: self.outbox.last(),
            detached: self.sandbox.detached.count(),
        }
    }
}

/// The inherited socket as a listener.
pub(crate) fn listener(descriptor: OwnedFd) -> io::Result<UnixListener> {
    let listener = StdUnixListener::from(descriptor);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// The owner of the session: the connection with the highest lease, or the latest of several with
/// the same lease.
#[derive(Debug, Default)]
struct Ownership {
    lease: Cell<u64>,
    current: RefCell<Option<Rc<Notify>>>,
}

impl Ownership {
    /// Makes the caller the owner and ends the previous ownership; `None` when its lease is old.
    /// The claim is notified when it ends.
    fn claim(&self, lease: u64) -> Option<Rc<Notify>> {
        if lease < self.lease.get() {
            return None;
        }
        self.lease.set(lease);
        let claim = Rc::new(Notify::new());
        if let Some(before) = self.current.replace(Some(Rc::clone(&claim))) {
            before.notify_one();
        }
        Some(claim)
    }

    /// Whether this ownership is still the current one.
    fn is_current(&self, claim: &Rc<Notify>) -> bool {
        self.current.borrow().as_ref().is_some_and(|current| Rc::ptr_eq(current, claim))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_lease_takes_over_and_older_is_rejected() {
        let ownership = Ownership::default();
        let first = ownership.claim(3).unwrap();
        assert!(ownership.claim(2).is_none());
        assert!(ownership.is_current(&first));
        let again = ownership.claim(3).unwrap();
        assert!(!ownership.is_current(&first) && ownership.is_current(&again));
        let newer = ownership.claim(4).unwrap();
        assert!(ownership.is_current(&newer));
        assert!(ownership.claim(3).is_none());
    }
}
