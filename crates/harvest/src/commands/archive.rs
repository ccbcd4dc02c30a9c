//! `harvest archive`: puts a session away; it can be read and forked still.

use anyhow::Result;

use crate::{Invocation, cli::One, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let session = client.act(&id, "archive").await?;
    here.print.result(&session, |_| String::new())?;
    here.print.note(format!("Archived {id}: {}", session.state.as_str()));
    Ok(0)
}
