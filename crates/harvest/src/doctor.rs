//! What this machine lacks: what the engine finds by trying, and the programs the rest of Harvest calls.
//! Each has a stable id and a way to mend it. Asked without a server, and where none could be started.

use harvest_proto::api::machines::{Finding, FindingLevel};
use harvest_providers::machines::{look, programs};

use crate::{config::Config, printer::hint_of, wire};

/// Everything there is to find, the engine's own first.
pub(crate) fn findings(config: &Config) -> Vec<Finding> {
    match wire::open_engine(config) {
        Ok(engine) => look(&engine),
        Err(error) => {
            let fix =
                hint_of(&error).unwrap_or_else(|| "mend what it says, then ask again".to_owned());
            let (id, found) = ("engine".to_owned(), format!("{error:#}"));
            let unopened = Finding { id, level: FindingLevel::Fail, found, fix: Some(fix) };
            [vec![unopened], programs()].concat()
        }
    }
}
