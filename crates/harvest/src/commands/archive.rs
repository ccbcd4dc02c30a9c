//! `harvest archive`: archives a session; it can still be read and forked.

use anyhow::Result;
use harvest_proto::{EventBody, api::SessionState};

use super::{FAILED, watch};
use crate::{Invocation, cli::SessionArg};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let mut session = client.post_verb(&id, "archive").await?;
    if session.state != SessionState::Archived {
        // The session's disk is saved first.
        watch::until(&client, &id, session.seq, archived_or_failed).await?;
        session = client.session(&id).await?;
    }
    ctx.print.document(&session)?;
    if session.state != SessionState::Archived {
        ctx.print.note(format!(
            "{id} is not archived: {} ({})",
            session.state.as_str(),
            session.reason
        ));
        return Ok(FAILED);
    }
    ctx.print.note(format!("Archived {id}"));
    Ok(0)
}

fn archived_or_failed(body: &EventBody) -> Option<()> {
    match body {
        EventBody::StateChanged {
            state: SessionState::Archived | SessionState::Failed, ..
        } => Some(()),
        _ => None,
    }
}
