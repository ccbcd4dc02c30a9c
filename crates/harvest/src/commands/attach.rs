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
    watch::follow(ctx, &client, &id, session.seq.saturating_sub(CONTEXT_EVENTS), StopWhen::Never)
        .await?;
    Ok(0)
}
