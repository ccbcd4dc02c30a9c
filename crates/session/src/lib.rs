//! Decides and drives what each session does next. Owns the `Provider` trait and the gateway's ledger.
#![forbid(unsafe_code)]

pub mod provider;
