//! `harvest queue`: what waits in a session, and in which order.

use anyhow::Result;
use harvest_proto::api::Prompt;

use crate::{
    Invocation,
    cli::Queue,
    client::Client,
    printer::table,
    render::{cut, first_line},
    resolve,
};

pub(crate) async fn run(here: &Invocation, verb: &Queue) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let (Queue::Ls(crate::cli::One { session })
    | Queue::Rm { session, .. }
    | Queue::Mv { session, .. }) = verb;
    let id = resolve::session(&client, session).await?;
    match verb {
        Queue::Ls(_) => {
            let prompts = client.prompts(&id).await?;
            here.print.result(&prompts, |prompts| {
                let rows: Vec<_> = prompts.iter().map(row).collect();
                table(&["ID", "STATUS", "PLACE", "AUTHOR", "TEXT"], &rows)
            })?;
        }
        Queue::Rm { prompt, .. } => {
            let prompt = resolve::prompt(&client, &id, prompt).await?;
            let cancelled = client.prompt_cancel(&id, &prompt).await?;
            // The text is given back: it may be the only copy.
            match here.print.json {
                true => here.print.result(&cancelled, |_| String::new())?,
                false => here.print.exact(&format!("{}\n", cancelled.text))?,
            }
            here.print.note(format!("Cancelled {prompt}"));
        }
        Queue::Mv { prompt, position, .. } => {
            let prompt = resolve::prompt(&client, &id, prompt).await?;
            let moved = client.prompt_move(&id, &prompt, *position).await?;
            here.print.result(&moved, |_| String::new())?;
            here.print
                .note(format!("Moved {prompt} to place {}", moved.position.unwrap_or(*position)));
        }
    }
    Ok(0)
}

fn row(prompt: &Prompt) -> Vec<String> {
    vec![
        prompt.id.to_string(),
        format!("{:?}", prompt.status).to_lowercase(),
        prompt.position.map_or_else(|| "–".into(), |place| place.to_string()),
        prompt.author.name.clone(),
        cut(first_line(&prompt.text), 72),
    ]
}
