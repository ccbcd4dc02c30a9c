//! `harvest doctor`: checks this machine and prints a fix for every problem.

use anyhow::Result;
use harvest_proto::api::{Finding, FindingLevel as Level};

use super::FAILED;
use crate::{Invocation, doctor::findings};

pub(crate) fn run(ctx: &Invocation) -> Result<u8> {
    let findings = findings(&ctx.config);
    if ctx.print.json {
        ctx.print.document(&findings)?;
    } else {
        for finding in &findings {
            let (mark, color, rest) = line(finding);
            ctx.print.marked_out(&mark, color, &(rest + "\n"))?;
        }
    }
    let failed = findings.iter().filter(|finding| finding.level == Level::Fail).count();
    if failed > 0 {
        let all = findings.len();
        ctx.print.hint(format!("{failed} of {all} checks failed; each line says how to fix it"));
        return Ok(FAILED);
    }
    Ok(0)
}

/// `ok    kernel                        Linux 6.12` as mark, colour and rest.
pub(crate) fn line(finding: &Finding) -> (String, &'static str, String) {
    let (mark, color) = match finding.level {
        Level::Ok => ("ok", "32"),
        Level::Warn => ("warn", "33"),
        Level::Fail => ("fail", "31"),
    };
    let fix = finding.fix.as_ref().map_or_else(String::new, |fix| format!("\n      fix: {fix}"));
    (format!("{mark:<4}"), color, format!("  {:<28}  {}{fix}", finding.id, finding.found))
}
