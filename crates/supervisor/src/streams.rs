//! Credit-based flow control in both directions: how many bytes a stream's sender may have in
//! flight.

use std::cell::{Cell, RefCell};

use harvest_proto::bridge::INITIAL_CREDIT_BYTES;
use tokio::sync::Notify;

/// The credit of an outgoing stream.
#[derive(Debug)]
pub(crate) struct Credit {
    available: Cell<u64>,
    more: Notify,
}

impl Default for Credit {
    fn default() -> Self {
        Self { available: Cell::new(u64::from(INITIAL_CREDIT_BYTES)), more: Notify::new() }
    }
}

impl Credit {
    pub(crate) fn grant(&self, bytes: u32) {
        self.available.set(self.available.get().saturating_add(u64::from(bytes)));
        self.more.notify_one();
    }

    /// Removes the limit, because the receiver is gone.
    pub(crate) fn lift_limit(&self) {
        self.available.set(u64::MAX);
        self.more.notify_one();
    }

    /// Waits until bytes may be sent; returns how many, at most `wanted`.
    pub(crate) async fn available(&self, wanted: usize) -> usize {
        while self.available.get() == 0 {
            self.more.notified().await;
        }
        usize::try_from(self.available.get()).map_or(wanted, |available| available.min(wanted))
    }

    pub(crate) fn spend(&self, bytes: usize) {
        self.available.set(self.available.get().saturating_sub(bytes as u64));
    }
}

/// Received bytes of an incoming stream that have not been consumed.
#[derive(Debug)]
pub(crate) struct Inbox {
    bytes: RefCell<Vec<u8>>,
    granted: Cell<u64>,
    ended: Cell<bool>,
    changed: Notify,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            bytes: RefCell::default(),
            granted: Cell::new(u64::from(INITIAL_CREDIT_BYTES)),
            ended: Cell::new(false),
            changed: Notify::new(),
        }
    }
}

impl Inbox {
    /// Adds received bytes; false when the sender exceeded its credit.
    pub(crate) fn push(&self, bytes: &[u8]) -> bool {
        let Some(left) = self.granted.get().checked_sub(bytes.len() as u64) else { return false };
        self.granted.set(left);
        self.bytes.borrow_mut().extend_from_slice(bytes);
        self.changed.notify_one();
        true
    }

    pub(crate) fn end(&self) {
        self.ended.set(true);
        self.changed.notify_one();
    }

    /// Waits for bytes; `None` at the end of the stream.
    pub(crate) async fn take(&self) -> Option<Vec<u8>> {
        loop {
            let bytes = std::mem::take(&mut *self.bytes.borrow_mut());
            if !bytes.is_empty() {
                return Some(bytes);
            }
            if self.ended.get() {
                return None;
            }
            self.changed.notified().await;
        }
    }

    /// Records new credit for consumed bytes; the caller sends it.
    pub(crate) fn grant_back(&self, bytes: usize) -> u32 {
        self.granted.set(self.granted.get() + bytes as u64);
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exceeding_the_credit_is_detected() {
        let inbox = Inbox::default();
        assert!(inbox.push(&vec![0; INITIAL_CREDIT_BYTES as usize]));
        assert!(!inbox.push(&[0]));
        assert_eq!(inbox.grant_back(10), 10);
        assert!(inbox.push(&[0; 10]));
        assert!(!inbox.push(&[0]));
    }

    proptest! {
        #[test]
        fn bytes_in_flight_never_exceed_the_credit(
            steps in proptest::collection::vec((any::<bool>(), 0u32..300_000), 0..60),
        ) {
            let credit = Credit::default();
            let (mut granted, mut sent) = (u64::from(INITIAL_CREDIT_BYTES), 0u64);
            for (grants, bytes) in steps {
                if grants {
                    credit.grant(bytes);
                    granted += u64::from(bytes);
                } else if credit.available.get() > 0 {
                    let allowed = credit.available.get().min(u64::from(bytes));
                    credit.spend(usize::try_from(allowed).unwrap());
                    sent += allowed;
                }
                prop_assert!(sent <= granted);
                prop_assert_eq!(granted - sent, credit.available.get());
            }
        }
    }
}
