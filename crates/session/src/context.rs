//! The context that sessions and their drivers share.

use std::sync::Arc;

use harvest_store::{Lease, Store};

use crate::{
    monotonic_clock::MonotonicClock, removals::Removals, repositories::Repositories,
    retention::RetentionEnforcer, sandbox_context::SandboxContext, tasks::Tasks,
    timeouts::Timeouts,
};

pub(crate) struct Shared {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) tasks: Tasks,
    /// For timeouts.
    pub(crate) clock: MonotonicClock,
    pub(crate) timeouts: Timeouts,
    pub(crate) sandboxes: Arc<SandboxContext>,
    pub(crate) repositories: Repositories,
    pub(crate) removals: Arc<Removals>,
    pub(crate) retention: Arc<RetentionEnforcer>,
}
