//! The words both sides share: ids, events, bridge frames, door headers, API bodies.
//!
//! Inert: no I/O, no async. Whatever two programs of ours say to each other is spelled here and
//! nowhere else, so that the server, the supervisor and the clients cannot drift apart.
#![forbid(unsafe_code)]

pub mod agents;
pub mod api;
pub mod bridge;
pub mod door;
pub mod event;
pub mod git;
pub mod ids;
pub mod launch;
pub mod nearest;
pub mod redact;
pub mod script;
pub mod secret;
pub mod time;

pub use agents::AgentName;
pub use event::{Event, EventBody};
pub use ids::{BlobId, ImageId, PromptId, SandboxId, SessionId, SnapshotId, TurnId};
pub use secret::Secret;
pub use time::Timestamp;
