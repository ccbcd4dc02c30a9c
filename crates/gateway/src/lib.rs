//! The door out: egress policy, git with credentials, model calls metered. Holds the secrets so that
//! no sandbox has to.
#![forbid(unsafe_code)]

pub mod ledger;
