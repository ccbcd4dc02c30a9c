//! Types shared by the server, the supervisor and the clients: ids, events, bridge frames, door
//! messages, API bodies. Pure data: no I/O, no async.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod agents;
pub mod api;
pub mod bridge;
pub mod door;
pub mod effort;
pub mod event;
pub mod hint;
pub mod ids;
pub mod image;
pub mod json;
pub mod launch;
pub mod meminfo;
pub mod money;
pub mod names;
pub mod network;
pub mod reason;
pub mod redact;
pub mod repository_address;
pub mod repository_name;
pub mod script;
pub mod secret;
pub mod secret_owner;
pub mod suggest;
pub mod text;
pub mod time;
pub mod upstreams;

pub use agents::AgentName;
pub use effort::Effort;
pub use event::{Event, EventBody};
pub use hint::Hint;
pub use ids::{
    BlobId, CallId, ImageId, PromptId, SandboxId, SessionId, SnapshotId, TurnId, VerificationId,
};
pub use money::{BUDGET_REACHED, InvalidMoney, Money, SpendingScope, budget_command};
pub use names::{BranchName, McpServerName, PromptText};
pub use network::{
    InvalidPort, NetworkPolicy, NetworkVerdict, RuleScope, RuleTarget, RuleVerdict, TrafficCount,
};
pub use reason::{StateReason, TurnReason};
pub use repository_name::{CheckoutFolder, RepositoryName, RepositoryRef};
pub use secret::Secret;
pub use secret_owner::{SecretOwner, SecretScope};
pub use time::Timestamp;
pub use upstreams::{ModelRef, UpstreamKind, UpstreamName};
