//! `harvest send`: queues a prompt, or answers the agent's question.

use anyhow::{Context, Result};
use harvest_proto::api::{CreatePrompt, SessionState};

use super::watch::{self, StopWhen};
use crate::{Invocation, cli::SendArgs, client::Client, resolve};

pub(crate) async fn run(ctx: &Invocation, args: SendArgs) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let is_answer = client.session(&id).await?.state == SessionState::NeedsInput && !args.now;
    let request = CreatePrompt { text: args.text, now: args.now, author: None };
    let prompt = client.prompt(&id, &request).await.context("cannot queue the prompt")?;
    if !args.follow {
        ctx.print.result(&prompt, |prompt| format!("{}\n", prompt.id))?;
        ctx.print.note(match (is_answer, prompt.position) {
            (true, _) => format!("Answered {id}"),
            (false, Some(position)) => format!("Queued on {id} at position {position}"),
            (false, None) => format!("Queued on {id}"),
        });
        return Ok(0);
    }
    let result =
        watch::follow(ctx, &client, &id, prompt.seq.saturating_sub(1), StopWhen::Idle).await?;
    Ok(watch::exit_code(ctx, &id, result))
}
