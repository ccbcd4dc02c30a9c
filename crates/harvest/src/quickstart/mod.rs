//! Everything once, on this machine, without an account: what `harvest quickstart` shows.
//!
//! Everything is real but the model: the sandbox, Claude Code in it, git, the tests, the pull request and
//! its evidence. The model is the gateway's scripted one, which plays `script.json`.

mod sample;
mod tour;

use std::{net::SocketAddr, path::Path};

use anyhow::{Context, Result};
use harvest_gateway::ScriptRule;

use crate::{
    Invocation,
    config::{Config, DEFAULT_PORT},
    wire::{self, Ending, Serving},
};

/// What the scripted model plays.
const SCRIPT: &str = include_str!("script.json");

/// As shells number the end by ctrl-c.
const INTERRUPTED: u8 = 130;

/// Shows everything; serves on afterwards when `keep`.
pub(crate) async fn run(here: &Invocation, keep: bool) -> Result<u8> {
    let home = here.config.home.join("quickstart");
    clean(here, &home)?;
    // The sample needs no package, so nothing is trusted; and what it does is nobody's work.
    let config = Config { trusted: Some(vec![]), database: None, ..here.config.at(&home) };
    let options = wire::Options { listen: free_port(), hosts: vec![], script: rules()? };
    let serving = Serving::start(&config, options).await.context("cannot start the server")?;
    let mut code = 0;
    let shown = tokio::select! {
        // First, so that it listens before the first step begins: a signal before that would end us at once.
        biased;
        _ = wire::asked_to_end() => {
            here.print.note("\nInterrupted");
            code = INTERRUPTED;
            Ok(())
        }
        shown = tour::run(here, &serving) => shown,
    };
    if shown.is_ok() && keep && code == 0 {
        here.print.note(format!("\nServing on {} until ctrl-c", serving.url()));
        here.print
            .hint(format!("`harvest --home {} ls`, in another terminal", serving.home().display()));
        wire::asked_to_end().await?;
    }
    let ended = serving.end(Ending::Pause).await;
    shown.and(ended)?;
    Ok(code)
}

/// Removes what an earlier quickstart made.
pub(crate) fn clean(here: &Invocation, home: &Path) -> Result<bool> {
    if !home.exists() {
        return Ok(false);
    }
    wire::remove_home(&here.config.at(home))
        .with_context(|| format!("cannot remove {}", home.display()))?;
    Ok(true)
}

/// The usual port, so that what is printed can be copied; any other when it is taken.
fn free_port() -> SocketAddr {
    let usual = SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT));
    match std::net::TcpListener::bind(usual) {
        Ok(_) => usual,
        Err(_) => SocketAddr::from(([127, 0, 0, 1], 0)),
    }
}

fn rules() -> Result<Vec<ScriptRule>> {
    serde_json::from_str(SCRIPT).context("the quickstart's own script cannot be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prompt_of_the_tour_has_its_script() {
        let rules = rules().unwrap();
        for prompt in [tour::FIRST, tour::SECOND, tour::THIRD] {
            let fitting = rules.iter().filter(|rule| prompt.contains(&rule.contains)).count();
            assert_eq!(fitting, 1, "{prompt}");
        }
    }

    #[test]
    fn what_the_script_edits_is_in_the_sample() {
        assert!(include_str!("sample/calc.py").contains("return a - b"));
        assert!(include_str!("sample/README.md").contains("A very small calculator."));
    }
}
