//! A callback for every stored event, for metrics. Followers of one session use
//! [`Store::event_follow`].

use std::sync::{Arc, PoisonError, RwLock};

use harvest_proto::Event;

use crate::Store;

type Callback = dyn Fn(&Event) + Send + Sync;

#[derive(Clone, Default)]
pub(crate) struct Watcher(Arc<RwLock<Option<Box<Callback>>>>);

impl Watcher {
    pub(crate) fn notify<'e>(&self, events: impl Iterator<Item = &'e Event>) {
        if let Some(callback) = &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            events.for_each(callback);
        }
    }
}

impl Store {
    /// Calls `callback` with every event stored from now on; replaces an earlier callback. The
    /// writer calls it, so it must not block.
    pub fn event_watch(&self, callback: impl Fn(&Event) + Send + Sync + 'static) {
        *self.writer.watcher.0.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Box::new(callback));
    }
}
