//! `harvest archive`: puts a session away; it can be read and forked still.

use anyhow::Result;
use harvest_proto::{EventBody, api::SessionState};

use super::{FAILED, watch};
use crate::{Invocation, cli::One, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let mut session = client.act(&id, "archive").await?;
    if session.state != SessionState::Archived {
        // Its machine is kept on disk first.
        watch::until(&client, &id, session.seq, settled).await?;
        session = client.session(&id).await?;
    }
    here.print.result(&session, |_| String::new())?;
    if session.state != SessionState::Archived {
        here.print.note(format!(
            "{id} is not archived: {} ({})",
            session.state.as_str(),
            session.reason
        ));
        return Ok(FAILED);
    }
    here.print.note(format!("Archived {id}"));
    Ok(0)
}

fn settled(body: &EventBody) -> Option<()> {
    match body {
        EventBody::StateChanged {
            state: SessionState::Archived | SessionState::Failed, ..
        } => Some(()),
        _ => None,
    }
}
