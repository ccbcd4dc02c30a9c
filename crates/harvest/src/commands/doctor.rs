//! `harvest doctor`: checks this machine and prints a fix for every problem.

use anyhow::Result;
use harvest_proto::api::{Finding, FindingLevel as Level};

use super::FAILED;
use crate::{
    Invocation,
    doctor::{findings, mcp_servers, model_key, secrets},
    sanitize::sanitize,
    style::Palette,
};

pub(crate) async fn run(ctx: &Invocation) -> Result<u8> {
    let mut findings = findings(&ctx.config);
    findings.push(model_key(&ctx.config).await);
    findings.push(secrets(&ctx.config).await);
    findings.push(mcp_servers(&ctx.config).await);
    if ctx.print.json {
        ctx.print.document(&findings)?;
    } else {
        for finding in &findings {
            ctx.print.styled_out(&(line(ctx.print.stdout, finding) + "\n"))?;
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

/// `ok    kernel                        Linux 6.12`
pub(crate) fn line(style: Palette, finding: &Finding) -> String {
    let mark = match finding.level {
        Level::Ok => style.ok("ok  "),
        Level::Warn => style.warn("warn"),
        Level::Fail => style.fail("fail"),
    };
    let fix = finding.fix.as_ref().map_or_else(String::new, |fix| format!("\n      fix: {fix}"));
    mark + &sanitize(&format!("  {:<28}  {}{fix}", finding.id, finding.found))
}
