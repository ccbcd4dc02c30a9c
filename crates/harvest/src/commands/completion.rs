//! `harvest completion`: prints shell completions for verbs and flags. Ids are not completed.

use anyhow::Result;
use clap::CommandFactory;

use crate::{
    cli::{Cli, CompletionArgs},
    printer::write_bytes,
};

pub(crate) fn run(args: &CompletionArgs) -> Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "harvest", &mut script);
    write_bytes(&script)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap_complete::Shell;

    #[test]
    fn completions_contain_every_verb() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "harvest", &mut script);
            let script = String::from_utf8(script).unwrap();
            for verb in Cli::command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
                assert!(script.contains(verb.get_name()), "{} for {shell}", verb.get_name());
            }
        }
    }
}
