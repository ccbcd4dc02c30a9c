//! Counts detached commands, which outlive the connection that started them, so that the sandbox is
//! not considered idle while they run.

use std::{cell::Cell, rc::Rc};

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Detached {
    count: Cell<u32>,
    /// Notified when the count changes.
    pub(crate) changed: Notify,
}

impl Detached {
    /// Counts a command until the guard is dropped.
    pub(crate) fn register(self: &Rc<Self>) -> DetachedGuard {
        self.set(self.count.get().saturating_add(1));
        DetachedGuard(Rc::clone(self))
    }

    pub(crate) fn count(&self) -> u32 {
        self.count.get()
    }

    fn set(&self, count: u32) {
        self.count.set(count);
        self.changed.notify_waiters();
    }
}

#[derive(Debug)]
pub(crate) struct DetachedGuard(Rc<Detached>);

impl Drop for DetachedGuard {
    fn drop(&mut self) {
        self.0.set(self.0.count.get().saturating_sub(1));
    }
}
