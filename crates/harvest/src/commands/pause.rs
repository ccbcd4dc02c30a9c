//! `harvest pause`: keeps a session on disk and ends its sandbox.

use std::time::Instant;

use anyhow::Result;

use crate::{Invocation, cli::One, client::Client, printer::took, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let began = Instant::now();
    let paused = client.pause(&id).await?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print
        .result(&paused, |paused| format!("{}\n", paused["snapshot"].as_str().unwrap_or("")))?;
    here.print.note(format!("Paused {id} in {time}; a prompt or `harvest resume {id}` wakes it"));
    Ok(0)
}
