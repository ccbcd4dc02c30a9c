//! `harvest rm`: removes sessions with their snapshots and history.

use anyhow::{Context, Result};

use crate::{Invocation, cli::RmArgs, client::Client, confirm, render::truncate, resolve};

pub(crate) async fn run(ctx: &Invocation, args: &RmArgs) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    // All ids are resolved before the first session is removed.
    let mut ids = Vec::new();
    for typed in &args.sessions {
        ids.push(resolve::session(&client, typed).await?);
    }
    if !args.yes {
        let mut shown = Vec::new();
        for id in &ids {
            let session = client.session(id).await?;
            shown.push(format!("{id} “{}”", truncate(&session.title, 40)));
        }
        let what = format!("{} with all snapshots and history", shown.join(", "));
        confirm::removal(ctx.print, false, &what)?;
    }
    for id in &ids {
        client
            .delete(&format!("/v1/sessions/{id}"))
            .await
            .with_context(|| format!("cannot remove {id}"))?;
        ctx.print.note(format!("Removed {id}"));
    }
    ctx.print.document(&serde_json::json!({ "removed": ids }))?;
    Ok(0)
}
