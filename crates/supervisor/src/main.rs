//! The static program inside the sandbox.
#![forbid(unsafe_code)]
fn main() {}
