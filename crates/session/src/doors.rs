//! The trait by which sandboxes get their doors; the gateway implements it.

use std::any::Any;

use harvest_gateway::{DoorListener, Gateway, ledger::DoorPolicy};

/// Opens doors for sandboxes.
pub trait Doors: Send + Sync {
    /// Serves one sandbox's door until the returned guard is dropped.
    fn open(&self, listener: Box<dyn DoorListener>, policy: DoorPolicy) -> Box<dyn Any + Send>;
}

impl Doors for Gateway {
    fn open(&self, listener: Box<dyn DoorListener>, policy: DoorPolicy) -> Box<dyn Any + Send> {
        Box::new(Self::open(self, listener, policy))
    }
}
