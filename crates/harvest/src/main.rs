//! The harvest binary.
#![forbid(unsafe_code)]
fn main() {}
