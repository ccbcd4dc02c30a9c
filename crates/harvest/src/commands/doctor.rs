//! `harvest doctor`: what this machine lacks, and how to mend it.

use anyhow::Result;
use harvest_proto::api::machines::{Finding, FindingLevel as Level};

use super::FAILED;
use crate::{Invocation, doctor::findings};

pub(crate) fn run(here: &Invocation) -> Result<u8> {
    let findings = findings(&here.config);
    if here.print.json {
        here.print.result(&findings, |_| String::new())?;
    } else {
        for finding in &findings {
            let (word, color, rest) = line(finding);
            here.print.marked_out(&word, color, &(rest + "\n"))?;
        }
    }
    let failed = findings.iter().filter(|finding| finding.level == Level::Fail).count();
    if failed > 0 {
        let all = findings.len();
        here.print.hint(format!("{failed} of {all} checks failed; each line says how to mend it"));
        return Ok(FAILED);
    }
    Ok(0)
}

/// `ok    kernel                        Linux 6.12`: the word, its colour, the rest.
pub(crate) fn line(finding: &Finding) -> (String, &'static str, String) {
    let (word, color) = match finding.level {
        Level::Ok => ("ok", "32"),
        Level::Warn => ("warn", "33"),
        Level::Fail => ("fail", "31"),
    };
    let fix = finding.fix.as_ref().map_or_else(String::new, |fix| format!("\n      fix: {fix}"));
    (format!("{word:<4}"), color, format!("  {:<28}  {}{fix}", finding.id, finding.found))
}
