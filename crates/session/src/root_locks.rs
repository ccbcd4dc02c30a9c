//! A lock for each session that a user created and those below it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use harvest_proto::SessionId;
use tokio::sync::OwnedMutexGuard;

/// The locks that are held or awaited, by the session at the root.
#[derive(Debug, Default)]
pub(crate) struct RootLocks(Mutex<HashMap<SessionId, Weak<tokio::sync::Mutex<()>>>>);

impl RootLocks {
    /// Waits for the lock of a root.
    pub(crate) async fn lock(&self, root: &SessionId) -> OwnedMutexGuard<()> {
        let lock = self.find(root);
        lock.lock_owned().await
    }

    fn find(&self, root: &SessionId) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().expect("no holder of this lock can panic");
        locks.retain(|_, lock| lock.strong_count() > 0);
        locks.get(root).and_then(Weak::upgrade).unwrap_or_else(|| {
            let new = Arc::default();
            locks.insert(root.clone(), Arc::downgrade(&new));
            new
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn locks_of_two_roots_are_independent() {
        let (locks, [one, other]) = (RootLocks::default(), [(); 2].map(|()| SessionId::random()));
        let held = locks.lock(&one).now_or_never().unwrap();
        assert!(locks.lock(&one).now_or_never().is_none());
        assert!(locks.lock(&other).now_or_never().is_some());
        drop(held);
        assert!(locks.lock(&one).now_or_never().is_some());
        assert_eq!(locks.0.lock().unwrap().len(), 1, "unused locks are removed");
    }
}
