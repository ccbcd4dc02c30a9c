//! `harvest queue`: lists, removes and moves a session's queued prompts.

use anyhow::Result;
use harvest_proto::api::Prompt;

use crate::{
    Invocation,
    cli::QueueCommand,
    client::Client,
    printer::table,
    render::{first_line, truncate},
    resolve,
};

pub(crate) async fn run(ctx: &Invocation, verb: &QueueCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    let (QueueCommand::Ls(crate::cli::SessionArg { session })
    | QueueCommand::Rm { session, .. }
    | QueueCommand::Mv { session, .. }) = verb;
    let id = resolve::session(&client, session).await?;
    match verb {
        QueueCommand::Ls(_) => {
            let prompts = client.prompts(&id).await?;
            ctx.print.result(&prompts, |prompts| {
                let rows: Vec<_> = prompts.iter().map(row).collect();
                table(&["ID", "STATUS", "POSITION", "AUTHOR", "TEXT"], &rows)
            })?;
        }
        QueueCommand::Rm { prompt, .. } => {
            let prompt = resolve::prompt(&client, &id, prompt).await?;
            let removed = client.prompt_cancel(&id, &prompt).await?;
            // Printed, since it may be the only copy of the text.
            match ctx.print.json {
                true => ctx.print.result(&removed, |_| String::new())?,
                false => ctx.print.verbatim(&format!("{}\n", removed.text))?,
            }
            ctx.print.note(format!("Removed {prompt}"));
        }
        QueueCommand::Mv { prompt, position, .. } => {
            let prompt = resolve::prompt(&client, &id, prompt).await?;
            let moved = client.prompt_move(&id, &prompt, *position).await?;
            ctx.print.result(&moved, |_| String::new())?;
            ctx.print.note(format!(
                "Moved {prompt} to position {}",
                moved.position.unwrap_or(*position)
            ));
        }
    }
    Ok(0)
}

fn row(prompt: &Prompt) -> Vec<String> {
    vec![
        prompt.id.to_string(),
        format!("{:?}", prompt.status).to_lowercase(),
        prompt.position.map_or_else(|| "–".into(), |position| position.to_string()),
        prompt.author.name.clone(),
        truncate(first_line(&prompt.text), 72),
    ]
}
