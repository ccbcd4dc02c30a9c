//! `harvest diff`: what a session has changed, as `git diff` prints it.

use anyhow::Result;
use serde_json::json;

use crate::{Invocation, cli::One, client::Client, resolve};

pub(crate) async fn run(here: &Invocation, args: &One) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let diff = client.diff(&id).await?;
    if diff.is_empty() {
        here.print.note("no changes");
    }
    match here.print.json {
        true => here.print.result(&json!({ "session": id, "diff": diff }), |_| String::new())?,
        false => here.print.exact(&diff)?,
    }
    Ok(0)
}
