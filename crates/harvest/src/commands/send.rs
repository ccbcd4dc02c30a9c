//! `harvest send`: queues a prompt, or answers the agent's question.

use anyhow::{Context, Result};
use harvest_proto::api::CreatePrompt;

use super::watch::{self, Until};
use crate::{Invocation, cli::Send, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: Send) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let request = CreatePrompt { text: args.text, now: args.now, author: None };
    let prompt = client.prompt(&id, &request).await.context("cannot queue the prompt")?;
    if !args.follow {
        here.print.result(&prompt, |prompt| format!("{}\n", prompt.id))?;
        let place = prompt.position.map_or_else(String::new, |place| format!(" at place {place}"));
        here.print.note(format!("Queued on {id}{place}"));
        return Ok(0);
    }
    let seen = watch::follow(here, &client, &id, prompt.seq.saturating_sub(1), Until::Rest).await?;
    Ok(watch::exit_code(here, &id, seen))
}
