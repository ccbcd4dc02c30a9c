//! `harvest queue`: lists, removes and moves a session's queued prompts.

use anyhow::Result;
use harvest_proto::api::{MovePrompt, Prompt};
use reqwest::Method;

use crate::{Invocation, cli::QueueCommand, render::first_line, resolve};

pub(crate) async fn run(ctx: &Invocation, verb: &QueueCommand) -> Result<u8> {
    let (QueueCommand::Ls(crate::cli::SessionArg { session })
    | QueueCommand::Rm { session, .. }
    | QueueCommand::Mv { session, .. }) = verb;
    let (client, id) = ctx.session(session).await?;
    match verb {
        QueueCommand::Ls(_) => {
            let headings = ["ID", "STATUS", "POSITION", "AUTHOR…", "TEXT…"];
            ctx.print.list(&in_order(client.prompts(&id).await?), headings, row)?;
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

/// Prompts in the order in which they run: first those that are not queued, oldest first.
fn in_order(mut prompts: Vec<Prompt>) -> Vec<Prompt> {
    prompts.sort_by_key(|prompt| (prompt.position, prompt.seq));
    prompts
}

fn row(prompt: &Prompt) -> [String; 5] {
    [
        prompt.id.to_string(),
        format!("{:?}", prompt.status).to_lowercase(),
        prompt.position.map_or_else(|| "–".into(), |position| position.to_string()),
        prompt.author.name.clone(),
        first_line(&prompt.text).to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_prompts_are_listed_in_running_order() {
        let prompt = |seq: u64, position: Option<u32>| -> Prompt {
            let status = if position.is_some() { "queued" } else { "completed" };
            serde_json::from_value(serde_json::json!({
                "id": "prm_4kq2aaaaaaaa", "text": "t", "status": status, "position": position, "attachments": [],
                "author": { "name": "Ada", "email": "ada@example.org" }, "turn": null, "seq": seq,
                "created_at": "1970-01-01T00:00:00.000Z",
            }))
            .unwrap()
        };
        let listed = [(2, Some(3)), (3, Some(1)), (4, Some(2)), (1, None)];
        let ordered = in_order(listed.map(|(seq, position)| prompt(seq, position)).to_vec());
        assert_eq!(ordered.iter().map(|prompt| prompt.seq).collect::<Vec<_>>(), [1, 3, 4, 2]);
    }
}
