//! `harvest resume`: starts the sandbox of a paused session again.

use anyhow::Result;

use crate::{Invocation, cli::One, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let session = client.act(&id, "resume").await?;
    here.print.result(&session, |_| String::new())?;
    here.print.note(format!("Resumed {id}: {}", session.state.as_str()));
    Ok(0)
}
