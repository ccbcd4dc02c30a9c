//! Decides and drives what each session does next. Owns the `Provider` trait and the gateway's ledger.
//!
//! A prompt's way: [`Sessions::prompt`] hands it to the session's `driver`, which writes it and its
//! event in one transaction before anyone is answered → the driver feeds the pure [`decide`] → what is
//! decided is written, then carried out: by the [`provider`], or over the [`bridge`].
#![forbid(unsafe_code)]

mod asks;
mod blobs;
pub mod bridge;
mod check;
mod checkout;
pub mod clocks;
mod create;
pub mod decide;
mod diffs;
pub mod disks;
mod driver;
mod error;
mod evidence;
mod exec;
mod follow;
mod forks;
mod hidden;
pub mod inside;
mod ledger;
pub mod machines;
mod meters;
mod once;
mod places;
pub mod provider;
mod reconcile;
mod removals;
mod repository;
mod retention;
mod secrets;
mod sessions;
mod steady;
mod suspend;
mod tokens;
mod trees;
mod usher;
mod vitals;
mod wiring;

pub use diffs::DiffRange;
pub use error::SessionError;
pub use forks::MOST_FORKS;
pub use harvest_store::{Claim, Lease, SessionFilter, Store, StoreError};
pub use ledger::Books;
pub use meters::{Counts, Histogram};
pub use once::Made;
pub use places::Limits;
pub use retention::Retention;
pub use sessions::Sessions;
pub use vitals::Vitals;
pub use wiring::{Config, Doors, Parts, PullOrder, Pulls, PullsError, words};
