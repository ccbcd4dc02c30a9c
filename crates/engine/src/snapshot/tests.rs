//! The rules snapshots keep, on real overlay mounts in a mount namespace of the test's own.

mod captures;
mod compared;
mod edits;
mod ends;
mod machine;
