//! Credit, both ways: how much a stream's sender may have in flight. Pure bookkeeping and waiting;
//! moves no bytes itself.

use std::cell::{Cell, RefCell};

use harvest_proto::bridge::INITIAL_CREDIT_BYTES;
use tokio::sync::Notify;

/// What we may still send on a stream.
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
    /// The receiver grants more.
    pub(crate) fn grant(&self, bytes: u32) {
        self.available.set(self.available.get().saturating_add(u64::from(bytes)));
        self.more.notify_one();
    }

    /// Nobody receives any more: who waits for credit waits no longer.
    pub(crate) fn lift(&self) {
        self.available.set(u64::MAX);
        self.more.notify_one();
    }

    /// Waits until something may be sent; how much, at most `wanted`.
    pub(crate) async fn available(&self, wanted: usize) -> usize {
        while self.available.get() == 0 {
            self.more.notified().await;
        }
        usize::try_from(self.available.get()).map_or(wanted, |available| available.min(wanted))
    }

    /// `bytes` have been sent.
    pub(crate) fn spend(&self, bytes: usize) {
        self.available.set(self.available.get().saturating_sub(bytes as u64));
    }
}

/// What has arrived on a stream and is not used yet.
#[derive(Debug)]
pub(crate) struct Inbox {
    bytes: RefCell<Vec<u8>>,
    granted: Cell<u64>,
    ended: Cell<bool>,
    news: Notify,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            bytes: RefCell::default(),
            granted: Cell::new(u64::from(INITIAL_CREDIT_BYTES)),
            ended: Cell::new(false),
            news: Notify::new(),
        }
    }
}

impl Inbox {
    /// Adds what arrived. False when the sender had no credit for it.
    pub(crate) fn push(&self, bytes: &[u8]) -> bool {
        let Some(left) = self.granted.get().checked_sub(bytes.len() as u64) else { return false };
        self.granted.set(left);
        self.bytes.borrow_mut().extend_from_slice(bytes);
        self.news.notify_one();
        true
    }

    /// No more comes.
    pub(crate) fn end(&self) {
        self.ended.set(true);
        self.news.notify_one();
    }

    /// Waits for what has arrived; `None` when everything has been taken and no more comes.
    pub(crate) async fn take(&self) -> Option<Vec<u8>> {
        loop {
            let bytes = std::mem::take(&mut *self.bytes.borrow_mut());
            if !bytes.is_empty() {
                return Some(bytes);
            }
            if self.ended.get() {
                return None;
            }
            self.news.notified().await;
        }
    }

    /// Grants the sender as much again; the caller tells it.
    pub(crate) fn used(&self, bytes: usize) -> u32 {
        self.granted.set(self.granted.get() + bytes as u64);
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sender_beyond_its_credit_is_noticed() {
        let inbox = Inbox::default();
        assert!(inbox.push(&vec![0; INITIAL_CREDIT_BYTES as usize]));
        assert!(!inbox.push(&[0]));
        assert_eq!(inbox.used(10), 10);
        assert!(inbox.push(&[0; 10]));
        assert!(!inbox.push(&[0]));
    }

    proptest! {
        #[test]
        fn what_is_in_flight_never_exceeds_what_was_granted(
            steps in proptest::collection::vec((any::<bool>(), 0u32..300_000), 0..60),
        ) {
            let credit = Credit::default();
            let (mut granted, mut sent) = (u64::from(INITIAL_CREDIT_BYTES), 0u64);
            for (grants, bytes) in steps {
                if grants {
                    credit.grant(bytes);
                    granted += u64::from(bytes);
                } else if credit.available.get() > 0 {
                    let may = credit.available.get().min(u64::from(bytes));
                    credit.spend(usize::try_from(may).unwrap());
                    sent += may;
                }
                prop_assert!(sent <= granted);
                prop_assert_eq!(granted - sent, credit.available.get());
            }
        }
    }
}
