//! `harvest doctor`: what this machine lacks, and how to mend it.

use anyhow::Result;

use super::FAILED;
use crate::{
    Invocation,
    doctor::{Check, Status, checks},
    printer::Printer,
};

pub(crate) fn run(here: &Invocation) -> Result<u8> {
    let checks = checks(&here.config.home);
    here.print.result(&checks, |checks| checks.iter().map(|check| line(&here.print, check)).collect())?;
    let failed = checks.iter().filter(|check| check.status == Status::Fail).count();
    if failed > 0 {
        here.print.hint(format!("{failed} of {} checks failed; each line says how to mend it", checks.len()));
        return Ok(FAILED);
    }
    Ok(0)
}

/// `ok    kernel            Linux 6.12`.
pub(crate) fn line(print: &Printer, check: &Check) -> String {
    let (word, color) = match check.status {
        Status::Ok => ("ok", "32"),
        Status::Warn => ("warn", "33"),
        Status::Fail => ("fail", "31"),
    };
    let fix = check.fix.map_or_else(String::new, |fix| format!("   fix: {fix}"));
    format!("{}  {:<16}  {}{fix}\n", print.paint(&format!("{word:<4}"), color), check.id, check.found)
}
