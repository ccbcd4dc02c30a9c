//! `harvest pause`: saves a session's disk and stops its sandbox.

use std::time::Instant;

use anyhow::Result;

use crate::{Invocation, cli::SessionArg, printer::human_elapsed};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let began = Instant::now();
    let paused = client.pause(&id).await?;
    let time = human_elapsed(began);
    ctx.print
        .result(&paused, |paused| format!("{}\n", paused["snapshot_id"].as_str().unwrap_or("")))?;
    ctx.print.note(format!("Paused {id} in {time}; a prompt or `harvest resume {id}` resumes it"));
    Ok(0)
}
