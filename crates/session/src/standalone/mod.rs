//! Standalone sandboxes, images and volumes: those that belong to no session. A provider implements
//! the traits; [`StandaloneSandboxes`] adds commands, idempotency and admission on top. Everything
//! works without a server too; with one, sandboxes count against its limits.

mod commands;
mod disks;
mod error;
mod images;
mod lifecycle;
mod sandboxes;

pub use commands::StandaloneSandboxes;
pub use disks::HostDisks;
pub use error::HostError;
pub use images::{Archive, ImageLines, Images, ImportImage};
pub use lifecycle::{Outcome, Requester};
pub use sandboxes::{CreatedEphemeral, ForkSpec, NewSandbox, Sandboxes};

/// All operations of a host.
pub trait SandboxHost: Sandboxes + Images + HostDisks {}

impl<T: Sandboxes + Images + HostDisks> SandboxHost for T {}
