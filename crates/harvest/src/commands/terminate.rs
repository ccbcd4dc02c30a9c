//! `harvest terminate`: stops a session's sandbox at once and saves its disk.

use std::time::Instant;

use anyhow::Result;

use crate::{Invocation, cli::SessionArg, printer::human_elapsed};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let began = Instant::now();
    let session = client.post_verb(&id, "terminate").await?;
    ctx.print.document(&session)?;
    let time = human_elapsed(began);
    ctx.print.note(format!("Terminated {id} in {time}: {}", session.state.as_str()));
    ctx.print.hint(format!("a prompt or `harvest resume {id}` continues from its disk"));
    Ok(0)
}
