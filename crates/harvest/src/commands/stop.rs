//! `harvest stop`: stops the current turn and waits for its end.

use std::time::Instant;

use anyhow::Result;
use harvest_proto::{EventBody, api::SessionState};

use super::watch;
use crate::{Invocation, cli::SessionArg, printer::human_elapsed};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let began = Instant::now();
    let before = client.session(&id).await?;
    let busy = matches!(before.state, SessionState::Running | SessionState::NeedsInput);
    let mut session = client.post_verb(&id, "stop").await?;
    if busy {
        // The response only confirms the request; the agent's processes are dead when the turn
        // ends.
        watch::until(&client, &id, before.seq, turn_ended()).await?;
        session = client.session(&id).await?;
    }
    ctx.print.document(&session)?;
    let time = human_elapsed(began);
    // The next queued prompt may run already.
    let queued = session.queued + u32::from(session.state == SessionState::Running);
    ctx.print.note(match (busy, queued) {
        (true, 0) => format!("Stopped the turn in {time}"),
        (true, 1) => format!("Stopped the turn in {time}; 1 queued prompt continues"),
        (true, _) => format!("Stopped the turn in {time}; {queued} queued prompts continue"),
        (false, _) => format!("{id} has no running turn; it is {}", session.state.as_str()),
    });
    Ok(0)
}

/// Detects that the turn has ended and the next state or turn has begun.
fn turn_ended() -> impl FnMut(&EventBody) -> Option<()> {
    let mut ended = false;
    move |body| match body {
        EventBody::TurnEnded { .. } => {
            ended = true;
            None
        }
        EventBody::TurnStarted { .. } => ended.then_some(()),
        EventBody::StateChanged {
            state: SessionState::Running | SessionState::NeedsInput, ..
        } => None,
        EventBody::StateChanged { .. } => Some(()),
        _ => None,
    }
}
