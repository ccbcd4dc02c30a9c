//! What sessions, builds and checks share to start sandboxes.

use std::sync::Arc;

use harvest_proto::api::SandboxLimits;
use harvest_store::Lease;

use crate::{
    agents::Agents,
    check_slots::CheckSlots,
    compute_meter::ComputeMeter,
    doors::Doors,
    sandboxes::{SandboxProvider, Sandboxes, admission::Admission},
    tasks::Tasks,
    timeouts::Timeouts,
};

pub(crate) struct SandboxContext {
    pub(crate) service: Sandboxes,
    /// The provider of `service`.
    pub(crate) provider: Arc<dyn SandboxProvider>,
    /// The admission of `service`.
    pub(crate) admission: Arc<Admission>,
    /// The meter of `service`.
    pub(crate) meter: Arc<ComputeMeter>,
    pub(crate) doors: Arc<dyn Doors>,
    pub(crate) agents: Agents,
    pub(crate) lease: Lease,
    pub(crate) timeouts: Timeouts,
    pub(crate) tasks: Tasks,
    /// Resource limits of each sandbox.
    pub(crate) resources: SandboxLimits,
    /// Slots of builds and checks.
    pub(crate) checks: Arc<CheckSlots>,
}
