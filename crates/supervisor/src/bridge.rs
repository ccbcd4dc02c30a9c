//! The listening side of the bridge: accepts connections and decides which one owns the session.
//! The protocol is in [`crate::connection`].

use std::{
    cell::{Cell, RefCell},
    io,
    os::{fd::OwnedFd, unix::net::UnixListener as StdUnixListener},
    rc::Rc,
    time::Duration,
};

use tokio::{net::UnixListener, sync::Notify};

use crate::{connection, log, supervisor::Supervisor};

// Delay after a failed accept (too many open files).
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The inherited socket as a listener.
pub(crate) fn listener(descriptor: OwnedFd) -> io::Result<UnixListener> {
    let listener = StdUnixListener::from(descriptor);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Accepts connections. `shutdown` is notified by the owner's `Shutdown` request.
pub(crate) async fn serve(
    supervisor: Rc<Supervisor>,
    listener: UnixListener,
    shutdown: Rc<Notify>,
) {
    let mut failing = false;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                failing = false;
                let (supervisor, shutdown) = (Rc::clone(&supervisor), Rc::clone(&shutdown));
                tokio::task::spawn_local(connection::serve(supervisor, stream, shutdown));
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

/// The owner of the session: the connection with the highest lease, or the latest of several with
/// the same lease.
#[derive(Debug, Default)]
pub(crate) struct Ownership {
    lease: Cell<u64>,
    count: Cell<u64>,
    current: RefCell<Option<(u64, Rc<Notify>)>>,
}

impl Ownership {
    /// Makes the caller the owner and ends the previous ownership; `None` when its lease is old.
    /// Returns a number that identifies the ownership, and a notifier for its end.
    pub(crate) fn claim(&self, lease: u64) -> Option<(u64, Rc<Notify>)> {
        if lease < self.lease.get() {
            return None;
        }
        self.lease.set(lease);
        self.count.set(self.count.get() + 1);
        let claim = (self.count.get(), Rc::new(Notify::new()));
        if let Some((_, before)) = self.current.replace(Some(claim.clone())) {
            before.notify_one();
        }
        Some(claim)
    }

    /// Whether this ownership is still the current one.
    pub(crate) fn is_current(&self, number: u64) -> bool {
        self.count.get() == number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_lease_takes_over_and_older_is_rejected() {
        let ownership = Ownership::default();
        let (first, _) = ownership.claim(3).unwrap();
        assert!(ownership.claim(2).is_none());
        assert!(ownership.is_current(first));
        let (again, _) = ownership.claim(3).unwrap();
        assert!(!ownership.is_current(first) && ownership.is_current(again));
        let (newer, _) = ownership.claim(4).unwrap();
        assert!(ownership.is_current(newer));
        assert!(ownership.claim(3).is_none());
    }
}
