//! Tests of the decision: by example, then random runs in which the server crashes, connections
//! break and every effect may fail.

mod examples;
mod failures;
mod freeze_and_slots;
mod properties;
mod restore;
mod simulation;
mod syncs;
