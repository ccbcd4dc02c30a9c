//! Decides and drives what each session does next. Owns the `Provider` trait and the gateway's
//! ledger.
//!
//! [`ServerParts::open`] builds the parts of a server from its [`Dependencies`]: [`Accounts`],
//! [`Repositories`] and [`Sessions`].
//!
//! The path of a prompt: [`Sessions::prompt`] hands it to the session's `driver`, which feeds the
//! pure [`decide`], writes the prompt, its event and the decision in one transaction, replies, and
//! then runs the effects through the [`provider`] or over the [`bridge`].
#![forbid(unsafe_code)]

mod accounts;
mod agent_launch;
mod agents;
mod artifacts;
pub mod bridge;
mod check_slots;
mod checkout;
mod compute_meter;
mod context;
pub mod decide;
mod doors;
mod driver;
mod ephemeral;
mod error;
mod error_chain;
mod forge_api;
mod git_remote;
mod hex;
mod history;
mod jobs;
mod ledger;
mod memory_file;
mod metrics;
mod monotonic_clock;
mod pool;
mod prices;
mod provider_retry;
mod reconcile;
mod removals;
mod repositories;
mod retention;
mod root_locks;
mod sandbox_context;
pub mod sandboxes;
mod secret_mask;
mod server_parts;
mod sessions;
mod tasks;
pub mod timeouts;
mod token_buckets;
mod tool_host;
mod tools;
mod trees;
mod uuid;
mod wall_clock;

/// What the server needs to offer tools by the Model Context Protocol.
pub mod mcp {
    pub use harvest_gateway::{
        ledger::{ToolResult, Tools},
        mcp_protocol::{Answer, answer, refuse_version},
    };

    pub use crate::tools::definition::{Definition, Effect, text};
}

pub use accounts::{Accounts, secret_binding};
pub use agents::{ConfiguredAgent, ConfiguredAgents};
pub use doors::Doors;
pub use error::SessionError;
pub use error_chain::error_chain;
pub use harvest_forge::{Forge, WebhookError, WebhookHeaders};
pub use harvest_gateway::{DoorListener, DoorObserver, DoorSocket, DoorStream};
pub use harvest_store::{
    BudgetOwner, Claim, Lease, RuleOwner, SessionFilter, SessionKey, Store, StoreError,
};
pub use history::HistoryLimits;
pub use ledger::StoreLedger;
pub use metrics::{Histogram, MetricCounts};
pub use pool::{PoolConfig, PoolCounts};
pub use prices::{Price, Prices};
pub use repositories::{ALL_AGENTS, Repositories, WebhookRefusal, default_image};
pub use retention::Retention;
pub use sandboxes::{Limits, Sandboxes};
pub use server_parts::{Config, Dependencies, ServerParts};
pub use sessions::{
    BundleBytes, CreatedUnderKey, DiffRange, MAX_FORKS, RestorePoint, ServerStats, SessionBundle,
    Sessions,
};
pub use token_buckets::TokenBuckets;
