//! Checks this machine: kernel features probed by the engine, and the programs Harvest calls. Each
//! finding has a stable id and a fix. Works without a server and when none can start.

use harvest_proto::api::{Finding, FindingLevel};
use harvest_providers::local::{host_findings, program_findings};

use crate::{config::Config, printer::hint_of, server_process};

/// All findings, the engine's first.
pub(crate) fn findings(config: &Config) -> Vec<Finding> {
    match server_process::open_engine(config) {
        Ok(engine) => host_findings(&engine),
        Err(error) => {
            let fix = hint_of(&error)
                .unwrap_or_else(|| "fix the error, then run `harvest doctor` again".to_owned());
            let (id, found) = ("engine".to_owned(), format!("{error:#}"));
            let engine_failed = Finding { id, level: FindingLevel::Fail, found, fix: Some(fix) };
            [vec![engine_failed], program_findings()].concat()
        }
    }
}
