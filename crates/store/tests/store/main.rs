//! Tests of the store, each on SQLite and on PostgreSQL.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

mod appends;
mod blobs;
mod budgets;
mod checkouts;
mod children;
mod compute;
mod damage;
mod events;
mod faults;
mod group_commit;
mod growth;
mod history;
mod leases;
mod memory;
mod network;
mod pool;
mod prompts;
mod records;
mod rest;
mod statements;
mod test_store;
mod user_limits;
mod verifications;
mod webhooks;
mod writes;
