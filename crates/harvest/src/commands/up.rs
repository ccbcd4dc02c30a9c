//! `harvest up`: the server, until it is asked to end.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use crate::{
    Invocation,
    cli::Up,
    commands::background,
    printer::took,
    wire::{self, Ending, Serving},
};

pub(crate) async fn run(here: &Invocation, args: Up) -> Result<u8> {
    if args.detach {
        return background::up(here, &args).await;
    }
    if args.detached {
        // Not of the terminal it was started from, whose end would be the server's.
        rustix::process::setsid().context("cannot leave the terminal")?;
    }
    let began = Instant::now();
    let config = &here.config;
    let options = wire::Options {
        listen: args.listen.unwrap_or(config.listen),
        hosts: config.hosts.iter().cloned().chain(args.hosts).collect(),
        script: vec![],
    };
    if !options.listen.ip().is_loopback() {
        here.print.note(format!("warning: {} can be reached from other machines", options.listen));
    }
    let serving = Serving::start(config, options).await.context("cannot start the server")?;
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    here.print.note(format!("Listening on {} after {}", serving.url(), took(millis)));
    if let Some(token) = serving.new_token() {
        here.print
            .note(format!("Token {token} (shown once; kept in {})", config.token_file().display()));
    }
    here.print.hint(
        "in another terminal: `harvest run -r REPOSITORY \"PROMPT\"`; ctrl-c ends the server",
    );
    if here.print.json {
        here.print.item(
            &json!({ "url": serving.url(), "pid": std::process::id(), "home": config.home }),
        )?;
    }
    wire::asked_to_end().await?;
    let ending = if args.keep { Ending::Keep } else { Ending::Pause };
    here.print.note(match ending {
        Ending::Keep => {
            "Ending; sandboxes go on and are adopted by the next `harvest up`; ctrl-c again ends at once"
        }
        Ending::Pause => {
            "Ending; sessions are kept on disk; ctrl-c again ends at once and leaves them running"
        }
    });
    let began = Instant::now();
    serving.end(ending).await?;
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    here.print.note(format!("Ended in {}", took(millis)));
    Ok(0)
}
