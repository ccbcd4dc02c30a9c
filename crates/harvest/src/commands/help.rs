//! `harvest help` and `harvest version`.

use std::ffi::OsString;

use anyhow::Result;
use serde_json::json;

use crate::{cli, printer::Printer};

/// Prints the help of a verb, as `harvest VERB --help` does.
pub(crate) fn help(path: &[String]) -> Result<u8> {
    let words = ["harvest"].into_iter().chain(path.iter().map(String::as_str)).chain(["--help"]);
    cli::parse(words.map(OsString::from));
    Ok(0)
}

pub(crate) fn version(print: Printer) -> Result<u8> {
    let version = env!("CARGO_PKG_VERSION");
    print.result(&json!({ "version": version }), |_| format!("harvest {version}\n"))?;
    Ok(0)
}
