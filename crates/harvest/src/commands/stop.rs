//! `harvest stop`: stops the turn in progress and waits until it is over.

use std::time::Instant;

use anyhow::Result;
use harvest_proto::{EventBody, api::SessionState};

use super::watch;
use crate::{Invocation, cli::One, client::Client, printer::took, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let began = Instant::now();
    let before = client.session(&id).await?;
    let busy = matches!(before.state, SessionState::Running | SessionState::NeedsInput);
    let mut session = client.act(&id, "stop").await?;
    if busy {
        // The answer comes when the stop is decided; what the agent started is dead when the turn has ended.
        watch::until(&client, &id, before.seq, turn_over()).await?;
        session = client.session(&id).await?;
    }
    here.print.result(&session, |_| String::new())?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    let state = session.state.as_str();
    here.print.note(match busy {
        true => format!("Stopped {id} in {time}: {state}"),
        false => format!("No turn is in progress in {id}: {state}"),
    });
    Ok(0)
}

/// Whether a turn is over and what comes after it has begun; nothing before.
fn turn_over() -> impl FnMut(&EventBody) -> Option<()> {
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
