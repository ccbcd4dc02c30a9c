//! `harvest attach`: follows a session live, from a little before now.

use anyhow::Result;

use super::watch::{self, Until};
use crate::{Invocation, cli::One, client::Client, resolve};

/// How many events before now are shown, so that the screen has a context.
const BEFORE: u64 = 200;

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let session = client.session(&id).await?;
    here.print.note(format!(
        "Attached to {id}, {} (ctrl-c detaches; it goes on)",
        session.state.as_str()
    ));
    watch::follow(here, &client, &id, session.seq.saturating_sub(BEFORE), Until::Detached).await?;
    Ok(0)
}
