//! `harvest fork`: starts new sessions from the end of a turn.

use anyhow::{Context, Result};
use harvest_proto::api::ForkSession;

use crate::{Invocation, cli::ForkArgs, prompt_input::PromptSource, resolve};

pub(crate) async fn run(ctx: &Invocation, args: ForkArgs) -> Result<u8> {
    let (typed, turn) = resolve::at_turn(&args.session)?;
    let turn = turn.or(args.turn);
    let prompts = PromptSource::several(args.prompts, args.editor)?;
    let (client, id) = ctx.session(typed).await?;
    let one = args.number.is_none() && prompts.len() < 2;
    let mut prompts = prompts.into_iter().map(PromptSource::read).collect::<Result<Vec<_>>>()?;
    // A single prompt is for every fork.
    let prompt = if prompts.len() == 1 { prompts.pop() } else { None };
    let request = ForkSession { turn, count: args.number, prompt, prompts, author: None };
    let forks = client.fork(&id, &request).await.with_context(|| format!("cannot fork {id}"))?;
    match (one, forks.first()) {
        (true, Some(fork)) => ctx.print.result(fork, |fork| format!("{}\n", fork.id))?,
        _ => ctx.print.result(&forks, |forks| {
            forks.iter().map(|fork| format!("{}\n", fork.id)).collect::<String>()
        })?,
    }
    let at = match turn {
        None => "its current state".to_owned(),
        Some(0) => "its start".to_owned(),
        Some(turn) => format!("turn {turn}"),
    };
    for fork in &forks {
        ctx.print.note(format!("Forked {id} at {at} as {} on {}", fork.id, fork.branch));
    }
    Ok(0)
}
