//! The rules the store keeps by itself, each on a file and on a PostgreSQL server.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod acts;
mod appends;
mod blobs;
mod checkouts;
mod damage;
mod events;
mod faults;
mod history;
mod home;
mod leases;
mod prompts;
mod records;
mod sharing;
mod statements;
