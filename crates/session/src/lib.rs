//! Decides and drives what each session does next. Owns the `Provider` trait and the gateway's
//! ledger.
//!
//! The path of a prompt: [`Sessions::prompt`] hands it to the session's `driver`, which feeds the
//! pure [`decide`], writes the prompt, its event and the decision in one transaction, replies, and
//! then runs the effects through the [`provider`] or over the [`bridge`].
#![forbid(unsafe_code)]

mod admission;
mod blobs;
pub mod bridge;
mod check;
mod checkout;
mod context;
mod create;
pub mod decide;
mod diffs;
pub mod disks;
mod driver;
mod ephemeral;
mod error;
mod evidence;
mod exec;
mod follow;
mod forks;
mod idempotency;
mod ledger;
mod metrics;
mod monotonic_clock;
pub mod provider;
mod reconcile;
mod removals;
mod repository;
mod retention;
pub mod sandbox_handle;
mod secrets;
mod sessions;
pub mod standalone;
mod stats;
mod suspend;
pub mod timeouts;
mod tokens;
mod trees;
mod verbs;

pub use admission::Limits;
pub use context::{Config, Dependencies, Doors, Forge, ForgeFailure, PullRequestSpec, error_chain};
pub use diffs::DiffRange;
pub use error::SessionError;
pub use forks::MAX_FORKS;
pub use harvest_store::{Claim, Lease, SessionFilter, Store, StoreError};
pub use idempotency::CreatedUnderKey;
pub use ledger::StoreLedger;
pub use metrics::{Histogram, MetricCounts};
pub use retention::Retention;
pub use sessions::Sessions;
pub use stats::ServerStats;
