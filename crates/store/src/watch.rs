//! Shows every event, once it is stored, to somebody who counts. Followers of one session use
//! [`Store::event_follow`].

use std::sync::{Arc, PoisonError, RwLock};

use harvest_proto::Event;

use crate::Store;

type See = dyn Fn(&Event) + Send + Sync;

/// Who watches, if anybody does.
#[derive(Clone, Default)]
pub(crate) struct Watcher(Arc<RwLock<Option<Box<See>>>>);

impl Watcher {
    /// This was stored.
    pub(crate) fn show<'e>(&self, events: impl Iterator<Item = &'e Event>) {
        if let Some(see) = &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            events.for_each(see);
        }
    }
}

impl Store {
    /// Calls `see` with every event stored from now on, in place of whoever watched before. It is called by
    /// the writer itself, so it must not wait.
    pub fn event_watch(&self, see: impl Fn(&Event) + Send + Sync + 'static) {
        *self.writer.watcher.0.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Box::new(see));
    }
}
