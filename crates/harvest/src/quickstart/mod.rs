//! The demo of `harvest quickstart`: everything once on this machine, without an account.
//!
//! Everything but the model is real: the sandbox, the agent in it, git, the tests, the pull request
//! and its check. The model is the gateway's scripted one, which plays `script.json`.

mod sample;
mod tour;

use std::{net::SocketAddr, path::Path};

use anyhow::{Context, Result};
use harvest_gateway::ScriptRule;
use harvest_proto::AgentName;
use harvest_session::{ALL_AGENTS, default_image};

use crate::{
    Invocation,
    config::Config,
    identity,
    server_process::{self, RunningServer, ShutdownMode},
};

/// The script of the model.
const SCRIPT: &str = include_str!("script.json");

/// The usual exit code after SIGINT.
const INTERRUPTED: u8 = 130;

/// Runs the demo with an agent; with `keep`, the server keeps running afterwards.
pub(crate) async fn run(ctx: &Invocation, agent: &AgentName, keep: bool) -> Result<u8> {
    let home = ctx.config.home.join("quickstart");
    clean(ctx, &home)?;
    let author = identity::configured(&ctx.config).unwrap_or_else(|| {
        let author = sample::author();
        ctx.print.note(format!(
            "git has no user.name and user.email here: commits of this demo are by {} <{}>, the \
             author of its sample repository",
            author.name, author.email
        ));
        author
    });
    // The demo uses its own database.
    let config = Config {
        database: None,
        // The repository is built on an image that has the agent.
        image: ctx.config.image.clone().or_else(|| image_of(agent)),
        author_name: Some(author.name),
        author_email: Some(author.email),
        ..ctx.config.at(&home)
    };
    let options = server_process::ServerOptions {
        listen: listen(ctx),
        hosts: vec![],
        script: rules()?,
        host_registries: false,
    };
    let server = RunningServer::start(&config, options).await.context("cannot start the server")?;
    let mut code = 0;
    let result = tokio::select! {
        // First, so that the signal handler is installed before the first step.
        biased;
        _ = server_process::shutdown_signal() => {
            ctx.print.note("\nInterrupted");
            code = INTERRUPTED;
            Ok(())
        }
        result = tour::run(ctx, &server, agent) => result,
    };
    if result.is_ok() && keep && code == 0 {
        ctx.print.note(format!("\nServing on {} until Ctrl-C", server.url()));
        ctx.print
            .hint(format!("`harvest --home {} ls`, in another terminal", server.home().display()));
        server_process::shutdown_signal().await?;
    }
    let stopped = server.shut_down(ShutdownMode::SuspendSessions).await;
    result.and(stopped)?;
    Ok(code)
}

/// Removes the data of an earlier quickstart.
pub(crate) fn clean(ctx: &Invocation, home: &Path) -> Result<bool> {
    if !home.exists() {
        return Ok(false);
    }
    server_process::remove_home(&ctx.config.at(home))
        .with_context(|| format!("cannot remove {}", home.display()))?;
    Ok(true)
}

/// The configured address, so that printed commands can be copied; if it is taken, any free port.
fn listen(ctx: &Invocation) -> SocketAddr {
    let configured = ctx.config.listen;
    match std::net::TcpListener::bind(configured) {
        Ok(_) => configured,
        Err(_) => {
            ctx.print.note(format!("{configured} is in use: the demo listens on another port"));
            SocketAddr::new(configured.ip(), 0)
        }
    }
}

/// The image of an agent that only one image has; `None` where the server chooses.
fn image_of(agent: &AgentName) -> Option<String> {
    (default_image(agent, false) == ALL_AGENTS).then(|| ALL_AGENTS.to_owned())
}

fn rules() -> Result<Vec<ScriptRule>> {
    serde_json::from_str(SCRIPT).context("cannot parse the quickstart's script")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_matches_one_script() {
        let rules = rules().unwrap();
        for prompt in [tour::FIRST, tour::SECOND, tour::VARIANTS[0], tour::VARIANTS[1]] {
            let matching = rules.iter().filter(|rule| prompt.contains(&rule.contains)).count();
            assert_eq!(matching, 1, "{prompt}");
        }
    }

    #[test]
    fn sample_contains_the_text_the_script_edits() {
        assert!(include_str!("sample/calc.py").contains("return a - b"));
        assert!(include_str!("sample/calc.py").contains("return add(a, a)"));
        assert!(include_str!("sample/README.md").contains("A very small calculator."));
    }
}
