//! `harvest fork`: another session that goes on from the end of a turn.

use anyhow::{Context, Result};
use harvest_proto::api::ForkSession;

use crate::{Invocation, cli::Fork, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: Fork) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let (typed, turn) = resolve::at_turn(&args.session)?;
    let turn = turn.or(args.turn);
    let id = resolve::session(&client, typed).await?;
    let request = ForkSession { turn, prompt: args.prompt };
    let fork = client.fork(&id, &request).await.with_context(|| format!("cannot fork {id}"))?;
    here.print.result(&fork, |fork| format!("{}\n", fork.id))?;
    let at = turn.map_or_else(|| "its newest turn".into(), |turn| format!("turn {turn}"));
    here.print.note(format!("Forked {id} at {at} as {} on {}", fork.id, fork.branch));
    Ok(0)
}
