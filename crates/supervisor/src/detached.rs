//! Commands that go on when whoever started them is gone: how many there are, so that nobody takes the machine
//! for idle. Starts and ends none of them.

use std::{cell::Cell, rc::Rc};

use tokio::sync::Notify;

/// The detached commands that run.
#[derive(Debug, Default)]
pub(crate) struct Detached {
    count: Cell<u32>,
    /// Rung when the number changes.
    pub(crate) news: Notify,
}

impl Detached {
    /// One more, for as long as what is returned lives.
    pub(crate) fn one(self: &Rc<Self>) -> One {
        self.change(self.count.get().saturating_add(1));
        One(Rc::clone(self))
    }

    /// How many run.
    pub(crate) fn count(&self) -> u32 {
        self.count.get()
    }

    fn change(&self, count: u32) {
        self.count.set(count);
        self.news.notify_waiters();
    }
}

/// A detached command that runs.
#[derive(Debug)]
pub(crate) struct One(Rc<Detached>);

impl Drop for One {
    fn drop(&mut self) {
        self.0.change(self.0.count.get().saturating_sub(1));
    }
}
