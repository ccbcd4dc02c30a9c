//! Asks before data is removed that Harvest cannot make again. Without a terminal, `--yes`
//! confirms.

use std::{
    io::{BufRead, IsTerminal},
    os::fd::AsFd,
};

use anyhow::{Context, Result, bail};

use crate::printer::{Advice, Printer};

#[derive(Debug, PartialEq, Eq)]
enum Confirmation {
    Given,
    Ask,
    Missing,
}

fn decide(yes: bool, terminal: bool) -> Confirmation {
    match (yes, terminal) {
        (true, _) => Confirmation::Given,
        (false, true) => Confirmation::Ask,
        (false, false) => Confirmation::Missing,
    }
}

/// Returns if the user wants to remove `what`.
pub(crate) fn removal(print: Printer, yes: bool, what: &str) -> Result<()> {
    match decide(yes, can_ask()) {
        Confirmation::Given => Ok(()),
        Confirmation::Missing => {
            let hint = "add `--yes` to confirm; only a terminal is asked";
            bail!(Advice::usage(format!("this removes {what} for good"), hint))
        }
        Confirmation::Ask => match ask(print, &format!("Remove {what}?"))? {
            true => Ok(()),
            false => bail!("nothing was removed"),
        },
    }
}

/// Whether a user is there to be asked: on a terminal, and not of a background job, which the
/// terminal stops when it reads.
pub(crate) fn can_ask() -> bool {
    let stdin = std::io::stdin();
    stdin.is_terminal() && std::io::stderr().is_terminal() && is_foreground(&stdin)
}

fn is_foreground(terminal: impl AsFd) -> bool {
    // Only the controlling terminal has a foreground group.
    !rustix::termios::tcgetpgrp(terminal).is_ok_and(|group| group != rustix::process::getpgrp())
}

/// Asks a question on the terminal.
pub(crate) fn ask(print: Printer, question: &str) -> Result<bool> {
    print.prompt(&format!("{question} [y/N] "));
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).context("cannot read the answer")?;
    Ok(is_yes(&answer))
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].contains(&answer.trim().to_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_terminal_is_asked() {
        assert_eq!(decide(false, true), Confirmation::Ask);
        assert_eq!(decide(false, false), Confirmation::Missing);
        assert_eq!([decide(true, true), decide(true, false)], [const { Confirmation::Given }; 2]);
    }

    #[test]
    fn only_yes_confirms() {
        assert!(is_yes("y\n") && is_yes("YES\n"));
        assert!(["", "\n", "n\n", "yep\n", "ja\n"].iter().all(|answer| !is_yes(answer)));
    }
}
