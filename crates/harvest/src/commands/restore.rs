//! `harvest restore`: takes a session back to the end of a turn.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use harvest_proto::api::{RestoreSession, Session, Snapshot};

use crate::{
    Invocation,
    cli::RestoreArgs,
    printer::{Advice, human_elapsed},
    resolve,
};

pub(crate) async fn run(ctx: &Invocation, args: &RestoreArgs) -> Result<u8> {
    let (typed, turn) = resolve::at_turn(&args.session)?;
    if let Some(named) = &args.snapshot {
        if turn.is_some() {
            bail!(Advice::usage("both a turn and a snapshot given", "leave one of them out"));
        }
        return restore_snapshot(ctx, typed, named).await;
    }
    let turn = turn.ok_or_else(|| {
        let hint =
            format!("write `harvest restore {typed}@TURN`; `harvest turns {typed}` lists the turns, @0 is the start");
        Advice::new("no turn given", hint)
    })?;
    let (client, id) = ctx.session(typed).await?;
    let began = Instant::now();
    let session: Session = client
        .post(
            &format!("/v1/sessions/{id}/restore"),
            &RestoreSession { turn: Some(turn), snapshot_id: None },
        )
        .await
        .with_context(|| format!("cannot restore turn {turn} of {id}"))?;
    let time = human_elapsed(began);
    ctx.print.document(&session)?;
    let point = if turn == 0 { "its start".to_owned() } else { format!("turn {turn}") };
    ctx.print.note(format!("Restored {id} to {point} in {time}: {}", session.state.as_str()));
    Ok(0)
}

/// Restores a snapshot by its id or name; of several with one name, the newest.
async fn restore_snapshot(ctx: &Invocation, typed: &str, named: &str) -> Result<u8> {
    let (client, id) = ctx.session(typed).await?;
    let all: Vec<Snapshot> = client.all(&format!("/v1/sessions/{id}/snapshots")).await?;
    let is_meant =
        |one: &&Snapshot| one.id.to_string() == named || one.name.as_deref() == Some(named);
    let Some(snapshot) = all.iter().rfind(is_meant).map(|one| one.id.clone()) else {
        let hint = format!("`harvest snapshot ls {id}` lists its snapshots");
        bail!(Advice::new(format!("{id} has no snapshot `{named}`"), hint));
    };
    let began = Instant::now();
    let body = RestoreSession { turn: None, snapshot_id: Some(snapshot.clone()) };
    let session: Session = client
        .post(&format!("/v1/sessions/{id}/restore"), &body)
        .await
        .with_context(|| format!("cannot restore {snapshot} of {id}"))?;
    let time = human_elapsed(began);
    ctx.print.document(&session)?;
    ctx.print.note(format!("Restored {id} to {snapshot} in {time}: {}", session.state.as_str()));
    Ok(0)
}
