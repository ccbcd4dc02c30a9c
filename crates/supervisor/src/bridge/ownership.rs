//! Decides which connection owns the session.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use tokio::sync::Notify;

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
