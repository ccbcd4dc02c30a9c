//! Starts, stops and snapshots sandboxes: local, fake; one contract suite for all.
#![forbid(unsafe_code)]

pub mod contract;
mod disks;
pub mod fake;
mod local;
pub mod machines;

pub use fake::Fake;
pub use local::Local;
pub use machines::LocalMachines;
