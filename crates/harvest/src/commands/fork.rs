//! `harvest fork`: starts new sessions from the end of a turn.

use anyhow::{Context, Result};
use harvest_proto::api::ForkSession;

use crate::{Invocation, cli::ForkArgs, resolve};

pub(crate) async fn run(ctx: &Invocation, args: ForkArgs) -> Result<u8> {
    let (typed, turn) = resolve::at_turn(&args.session)?;
    let turn = turn.or(args.turn);
    let (client, id) = ctx.session(typed).await?;
    let one = args.number.is_none() && args.prompts.len() < 2;
    let mut prompts = args.prompts;
    // A single prompt is for every fork.
    let prompt = if prompts.len() == 1 { prompts.pop() } else { None };
    let request = ForkSession { turn, count: args.number, prompt, prompts };
    let forks = client.fork(&id, &request).await.with_context(|| format!("cannot fork {id}"))?;
    match (one, forks.first()) {
        (true, Some(fork)) => ctx.print.result(fork, |fork| format!("{}\n", fork.id))?,
        _ => ctx.print.result(&forks, |forks| {
            forks.iter().map(|fork| format!("{}\n", fork.id)).collect::<String>()
        })?,
    }
    let at = turn.map_or_else(|| "its current state".into(), |turn| format!("turn {turn}"));
    for fork in &forks {
        ctx.print.note(format!("Forked {id} at {at} as {} on {}", fork.id, fork.branch));
    }
    Ok(0)
}
