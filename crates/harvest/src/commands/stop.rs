//! `harvest stop`: stops the turn in progress; with `--terminate`, the sandbox too.

use std::time::Instant;

use anyhow::Result;

use crate::{Invocation, cli::Stop, client::Client, printer::took, resolve};

pub(crate) async fn run(here: &Invocation, args: &Stop) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let began = Instant::now();
    let (verb, past) = if args.terminate { ("terminate", "Terminated") } else { ("stop", "Stopped") };
    let session = client.act(&id, verb).await?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print.result(&session, |_| String::new())?;
    here.print.note(format!("{past} {id} in {time}: {}", session.state.as_str()));
    Ok(0)
}
