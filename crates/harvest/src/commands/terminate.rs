//! `harvest terminate`: ends a session's sandbox at once and keeps its disk.

use std::time::Instant;

use anyhow::Result;

use crate::{Invocation, cli::One, client::Client, printer::took, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let began = Instant::now();
    let session = client.act(&id, "terminate").await?;
    here.print.result(&session, |_| String::new())?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print.note(format!("Terminated {id} in {time}: {}", session.state.as_str()));
    here.print.hint(format!("a prompt or `harvest resume {id}` goes on with what it left"));
    Ok(0)
}
