//! `harvest doctor`: what this machine lacks, and how to mend it.

use anyhow::Result;

use super::FAILED;
use crate::{
    Invocation,
    doctor::{Check, Status, checks},
};

pub(crate) fn run(here: &Invocation) -> Result<u8> {
    let checks = checks(&here.config.home);
    if here.print.json {
        here.print.result(&checks, |_| String::new())?;
    } else {
        for check in &checks {
            let (word, color, rest) = line(check);
            here.print.marked_out(&word, color, &(rest + "\n"))?;
        }
    }
    let failed = checks.iter().filter(|check| check.status == Status::Fail).count();
    if failed > 0 {
        here.print.hint(format!("{failed} of {} checks failed; each line says how to mend it", checks.len()));
        return Ok(FAILED);
    }
    Ok(0)
}

/// `ok    kernel            Linux 6.12`: the word, its colour, the rest.
pub(crate) fn line(check: &Check) -> (String, &'static str, String) {
    let (word, color) = match check.status {
        Status::Ok => ("ok", "32"),
        Status::Warn => ("warn", "33"),
        Status::Fail => ("fail", "31"),
    };
    let fix = check.fix.map_or_else(String::new, |fix| format!("\n      fix: {fix}"));
    (format!("{word:<4}"), color, format!("  {:<16}  {}{fix}", check.id, check.found))
}
