//! `harvest rm`: deletes sessions with all they hold.

use anyhow::{Context, Result};

use crate::{Invocation, cli::Rm, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: &Rm) -> Result<u8> {
    let client = Client::find(&here.config)?;
    // All are looked up first: a slip in the last must not cost the first.
    let mut ids = Vec::new();
    for typed in &args.sessions {
        ids.push(resolve::session(&client, typed).await?);
    }
    for id in &ids {
        client.delete(id).await.with_context(|| format!("cannot delete {id}"))?;
        here.print.note(format!("Deleted {id}"));
    }
    if here.print.json {
        here.print.result(&serde_json::json!({ "deleted": ids }), |_| String::new())?;
    }
    Ok(0)
}
