//! `harvest send`: queues a prompt, or answers the agent's question.

use anyhow::{Context, Result};
use harvest_proto::api::{CreatePrompt, PromptStatus};

use super::watch::{self, StopWhen};
use crate::{Invocation, attachments, cli::SendArgs, prompt_input::PromptSource};

pub(crate) async fn run(ctx: &Invocation, args: SendArgs) -> Result<u8> {
    let prompt = PromptSource::one(args.prompt)?;
    let (client, id) = ctx.session(&args.session).await?;
    let request = CreatePrompt {
        now: args.now,
        agent: args.agent,
        model: args.model,
        effort: args.effort,
        attachments: attachments::read(&args.attach)?,
        ..CreatePrompt::new(prompt.read()?)
    };
    let prompt = client.prompt(&id, &request).await.context("cannot queue the prompt")?;
    if !args.follow {
        // A mask has as many characters as what it replaces. Who follows sees the event.
        let (sent, stored) = (request.text.as_str(), prompt.text.as_str());
        if sent != stored && sent.chars().count() == stored.chars().count() {
            ctx.print.warn(format!(
                "the prompt contained the value of a secret, which was masked (`harvest events {id}` \
                 names it)"
            ));
        }
        ctx.print.result(&prompt, |prompt| format!("{}\n", prompt.id))?;
        ctx.print.note(match (prompt.status, prompt.position) {
            (PromptStatus::Queued, Some(position)) => {
                format!("Queued on {id} at position {position}")
            }
            // An answer is in no queue.
            (PromptStatus::Queued, None) => format!("Answered {id}"),
            _ => format!("Queued on {id}"),
        });
        return Ok(0);
    }
    let result =
        watch::follow(ctx, &client, &id, prompt.seq.saturating_sub(1), StopWhen::Idle).await?;
    Ok(watch::exit_code(ctx, &id, result))
}
