//! Sandbox providers: the local one, and, with the feature `testing`, a fake one and a contract
//! suite that every provider must pass.
#![forbid(unsafe_code)]

#[cfg(feature = "testing")]
pub mod contract;
#[cfg(feature = "testing")]
pub mod fake;
pub mod local;

#[cfg(feature = "testing")]
pub use fake::Fake;
pub use local::{Local, debian_mirrors, host_settings};
