//! The rows of large repositories: a session on fifty thousand files is to start almost as fast as
//! one on a hundred.

use anyhow::Result;
use harvest_e2e::Host;

use crate::{
    agents::{PreparedStart, prepared_starts},
    options::Options,
    report::Report,
};

const BUILD_SMALL: &str = "large: 100 files, POST → ready from a build";
const BUILD_LARGE: &str = "large: 50,000 files, POST → ready from a build";
const POOL_SMALL: &str = "large: 100 files, POST → ready from the pool";
const POOL_LARGE: &str = "large: 50,000 files, POST → ready from the pool";

/// Targets for p50, as a multiple of that of the small repository.
pub(crate) const TARGETS: [(&str, &[&str], f64); 2] =
    [(BUILD_LARGE, &[BUILD_SMALL], 1.5), (POOL_LARGE, &[POOL_SMALL], 1.5)];

const SMALL: usize = 100;
const LARGE: usize = 50_000;
const LARGE_IN_QUICK_RUNS: usize = 2_000;

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("large: ")
}

/// Measures the rows and adds them to the report.
pub(crate) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let host = Host::start_with(&[("HARVEST_IMAGE", "agents")]).await;
        let large = if options.quick { LARGE_IN_QUICK_RUNS } else { LARGE };
        for (name, count) in [("small", SMALL), ("large", large)] {
            let files: Vec<(String, String)> = (0..count).map(file).collect();
            let files: Vec<(&str, &str)> =
                files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
            host.repository(name, &files).await;
        }
        let start = |row, repository| PreparedStart { row, repository, model: "scripted" };
        let starts = [
            (start(BUILD_SMALL, "small"), false),
            (start(BUILD_LARGE, "large"), false),
            (start(POOL_SMALL, "small"), true),
            (start(POOL_LARGE, "large"), true),
        ];
        let rounds = options.rounds.div_ceil(5);
        report.add(prepared_starts(&host, &starts, (options.gap, rounds)).await?);
        Ok(())
    })
}

/// A small source file, a hundred of which are in a folder.
fn file(number: usize) -> (String, String) {
    let text = format!("pub const NUMBER: usize = {number};\n").repeat(20);
    (format!("src/part{}/file{number}.rs", number / 100), text)
}
