//! `harvest restore`: takes a session back to the end of a turn.

use std::time::Instant;

use anyhow::{Context, Result};
use harvest_proto::api::{RestoreSession, Session};

use crate::{
    Invocation,
    cli::RestoreArgs,
    printer::{Advice, human_elapsed},
    resolve,
};

pub(crate) async fn run(ctx: &Invocation, args: &RestoreArgs) -> Result<u8> {
    let (typed, turn) = resolve::at_turn(&args.session)?;
    let turn = turn.ok_or_else(|| {
        let hint =
            format!("write `harvest restore {typed}@TURN`; `harvest turns {typed}` lists the turns, @0 is the start");
        Advice::new("no turn given", hint)
    })?;
    let (client, id) = ctx.session(typed).await?;
    let began = Instant::now();
    let session: Session = client
        .post(&format!("/v1/sessions/{id}/restore"), &RestoreSession { turn })
        .await
        .with_context(|| format!("cannot restore turn {turn} of {id}"))?;
    let time = human_elapsed(began);
    ctx.print.document(&session)?;
    let point = if turn == 0 { "its start".to_owned() } else { format!("turn {turn}") };
    ctx.print.note(format!("Restored {id} to {point} in {time}: {}", session.state.as_str()));
    Ok(0)
}
