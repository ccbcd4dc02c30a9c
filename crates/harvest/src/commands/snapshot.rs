//! `harvest snapshot`: the disks that were kept.

use std::time::SystemTime;

use anyhow::{Result, bail};
use harvest_proto::{
    Timestamp,
    api::{
        Page,
        machines::{MachineSnapshot, Owned},
    },
};
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    cli::Snapshot,
    client::Client,
    desk::Desk,
    printer::{Advice, table},
    resolve,
};

pub(crate) async fn run(here: &Invocation, verb: &Snapshot) -> Result<u8> {
    if let Snapshot::Pin { at } | Snapshot::Unpin { at } = verb {
        return pin(here, at, matches!(verb, Snapshot::Pin { .. })).await;
    }
    let desk = Desk::find(&here.config)?;
    let snapshots = desk.get::<Page<MachineSnapshot>>("/v1/snapshots").await?.items;
    match verb {
        Snapshot::Pin { .. } | Snapshot::Unpin { .. } => unreachable!("done above"),
        Snapshot::Ls => {
            let now = Timestamp::from(SystemTime::now());
            here.print.result(&snapshots, |snapshots| {
                let rows: Vec<_> = snapshots.iter().map(|snapshot| row(snapshot, now)).collect();
                table(&["ID", "OF", "LAYERS", "DURABLE", "AGE"], &rows)
            })?;
        }
        Snapshot::Rm { snapshots: typed, force } => {
            let mut ids = Vec::new();
            for typed in typed {
                let id = resolve::snapshot(&desk, typed).await?;
                let of_sessions =
                    |kept: &MachineSnapshot| kept.id == id && kept.owner == Owned::Session;
                // Before the first of them goes.
                if !force && snapshots.iter().any(of_sessions) {
                    let hint =
                        "`harvest rm SESSION` and `harvest repo rm` forget theirs; --force insists";
                    bail!(Advice::new(
                        format!("a session or repository may go on from {id}"),
                        hint
                    ));
                }
                ids.push(id);
            }
            for id in &ids {
                desk.delete(&format!("/v1/snapshots/{id}?force={force}")).await?;
                here.print.note(format!("Forgot {id}"));
            }
            if here.print.json {
                here.print.result(&json!({ "removed": ids }), |_| String::new())?;
            }
        }
    }
    Ok(0)
}

/// `SESSION@TURN`, or where the session stands.
async fn pin(here: &Invocation, at: &str, pinned: bool) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let (typed, turn) = resolve::at_turn(at)?;
    let session = resolve::session(&client, typed).await?;
    let snapshot = match turn {
        None => client.session(&session).await?.snapshot,
        Some(turn) => {
            let all = client.snapshots(&session).await?;
            all.into_iter()
                .rfind(|snapshot| snapshot.turn == Some(turn))
                .map(|snapshot| snapshot.id)
        }
    };
    let Some(snapshot) = snapshot else {
        let hint = format!("see `harvest turns {session}`");
        bail!(Advice::new("there is no snapshot of it", hint));
    };
    let shown = client.snapshot_pin(&session, &snapshot, pinned).await?;
    here.print.result(&shown, |shown| format!("{}\n", shown.id))?;
    let kept = if pinned {
        "is kept whatever retention says"
    } else {
        "is kept as long as retention says"
    };
    here.print.note(format!("{snapshot} of {session} {kept}"));
    Ok(0)
}

fn row(snapshot: &MachineSnapshot, now: Timestamp) -> Vec<String> {
    vec![
        snapshot.id.to_string(),
        match snapshot.owner {
            Owned::Session => "session",
            Owned::You => "you",
        }
        .to_owned(),
        snapshot.layers.len().to_string(),
        if snapshot.durable { "yes" } else { "not yet" }.to_owned(),
        age(now.since(snapshot.created_at).as_secs()),
    ]
}
