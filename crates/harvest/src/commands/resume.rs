//! `harvest resume`: starts a paused session's sandbox and waits until it accepts prompts.

use std::time::Instant;

use anyhow::Result;
use harvest_proto::{EventBody, api::SessionState};

use super::{FAILED, watch};
use crate::{Invocation, cli::SessionArg, printer::human_elapsed};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let began = Instant::now();
    let mut session = client.post_verb(&id, "resume").await?;
    let mut resumed = true;
    if matches!(session.state, SessionState::Queued | SessionState::Starting) {
        resumed = watch::until(&client, &id, session.seq, came_up).await?;
        session = client.session(&id).await?;
    }
    ctx.print.document(&session)?;
    if !resumed {
        ctx.print.note(format!("{id} did not resume: {}", session.reason));
        ctx.print.hint(format!("`harvest logs {id}` says why"));
        return Ok(FAILED);
    }
    let time = human_elapsed(began);
    ctx.print.note(format!("Resumed {id} in {time}: {}", session.state.as_str()));
    Ok(0)
}

/// Whether a starting session is up; `None` while it is still starting.
fn came_up(body: &EventBody) -> Option<bool> {
    match body {
        EventBody::StateChanged { state, .. } => match state {
            SessionState::Queued | SessionState::Starting => None,
            SessionState::Failed | SessionState::Paused | SessionState::Archived => Some(false),
            SessionState::Running | SessionState::Idle | SessionState::NeedsInput => Some(true),
        },
        _ => None,
    }
}
