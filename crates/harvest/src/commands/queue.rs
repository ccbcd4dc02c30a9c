//! `harvest queue`: lists, removes and moves a session's queued prompts.

use anyhow::Result;
use harvest_proto::api::{MovePrompt, Prompt};
use reqwest::Method;

use crate::{
    Invocation,
    cli::QueueCommand,
    render::{first_line, truncate},
    resolve,
};

pub(crate) async fn run(ctx: &Invocation, verb: &QueueCommand) -> Result<u8> {
    let (QueueCommand::Ls(crate::cli::SessionArg { session })
    | QueueCommand::Rm { session, .. }
    | QueueCommand::Mv { session, .. }) = verb;
    let (client, id) = ctx.session(session).await?;
    match verb {
        QueueCommand::Ls(_) => {
            let headings = ["ID", "STATUS", "POSITION", "AUTHOR", "TEXT"];
            ctx.print.list(&client.prompts(&id).await?, headings, row)?;
        }
        QueueCommand::Rm { prompt, .. } => {
            let prompt = resolve::prompt(&client, &id, prompt).await?;
            let path = format!("/v1/sessions/{id}/prompts/{prompt}");
            let removed: Prompt = client.call(client.request(Method::DELETE, &path)).await?;
            // Printed, since it may be the only copy of the text.
            match ctx.print.json {
                true => ctx.print.document(&removed)?,
                false => ctx.print.verbatim(&format!("{}\n", removed.text))?,
            }
            ctx.print.note(format!("Removed {prompt}"));
        }
        QueueCommand::Mv { prompt, position, .. } => {
            let prompt = resolve::prompt(&client, &id, prompt).await?;
            let path = format!("/v1/sessions/{id}/prompts/{prompt}");
            let request =
                client.request(Method::PATCH, &path).json(&MovePrompt { position: *position });
            let moved: Prompt = client.call(request).await?;
            ctx.print.document(&moved)?;
            ctx.print.note(format!(
                "Moved {prompt} to position {}",
                moved.position.unwrap_or(*position)
            ));
        }
    }
    Ok(0)
}

fn row(prompt: &Prompt) -> [String; 5] {
    [
        prompt.id.to_string(),
        format!("{:?}", prompt.status).to_lowercase(),
        prompt.position.map_or_else(|| "–".into(), |position| position.to_string()),
        prompt.author.name.clone(),
        truncate(first_line(&prompt.text), 72),
    ]
}
