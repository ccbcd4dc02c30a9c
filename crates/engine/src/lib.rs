//! The local machine: layers, images, snapshots, isolated process trees, the zygote.
//!
//! Synchronous, and the only crate with unsafe code: every kernel call that Rust cannot vouch for is
//! here, each with the reason why it is sound.
#![expect(unsafe_code, reason = "clone3, mount and seccomp have no safe wrappers")]
