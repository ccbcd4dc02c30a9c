//! `harvest restore`: goes back to the end of a turn, in the same session.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::{
    Invocation,
    cli::Restore,
    client::Client,
    printer::{Advice, took},
    resolve,
};

pub(crate) async fn run(here: &Invocation, args: &Restore) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let (typed, turn) = resolve::at_turn(&args.session)?;
    let turn = turn.ok_or_else(|| {
        let hint =
            format!("write `harvest restore {typed}@TURN`; `harvest show {typed}` lists the turns");
        Advice::new("which turn is not said", hint)
    })?;
    let id = resolve::session(&client, typed).await?;
    let began = Instant::now();
    let session = client
        .restore(&id, turn)
        .await
        .with_context(|| format!("cannot restore turn {turn} of {id}"))?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print.result(&session, |_| String::new())?;
    here.print.note(format!("Restored {id} to turn {turn} in {time}: {}", session.state.as_str()));
    Ok(0)
}
