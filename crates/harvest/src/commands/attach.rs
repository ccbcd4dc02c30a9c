//! `harvest attach`: follows a session live, starting with its recent events.

use anyhow::Result;

use super::watch::{self, StopWhen};
use crate::{Invocation, cli::SessionArg};

/// Earlier events that are shown as context.
const CONTEXT_EVENTS: u64 = 200;

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let session = client.session(&id).await?;
    ctx.print.note(format!(
        "Attached to {id}, {} (Ctrl-C detaches; the session keeps running)",
        session.state.as_str()
    ));
    let after = session.seq.saturating_sub(CONTEXT_EVENTS);
    let result = watch::follow(ctx, &client, &id, after, StopWhen::Never).await?;
    Ok(watch::exit_code(ctx, &id, result))
}
