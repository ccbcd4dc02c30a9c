//! `harvest resume`: starts the sandbox of a paused session again and waits until it takes prompts.

use std::time::Instant;

use anyhow::Result;
use harvest_proto::{EventBody, api::SessionState};

use super::{FAILED, watch};
use crate::{Invocation, cli::One, client::Client, printer::took, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let began = Instant::now();
    let mut session = client.act(&id, "resume").await?;
    let mut awake = true;
    if matches!(session.state, SessionState::Queued | SessionState::Starting) {
        awake = watch::until(&client, &id, session.seq, came_up).await?;
        session = client.session(&id).await?;
    }
    here.print.result(&session, |_| String::new())?;
    if !awake {
        here.print.note(format!("{id} did not come back: {}", session.reason));
        here.print.hint(format!("`harvest logs {id}` says why"));
        return Ok(FAILED);
    }
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print.note(format!("Resumed {id} in {time}: {}", session.state.as_str()));
    Ok(0)
}

/// Whether a session that starts has come up; nothing while it is on its way.
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
