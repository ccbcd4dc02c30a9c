//! `harvest snapshot`: the disks that were kept.

use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use harvest_proto::Timestamp;
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    cli::Snapshot,
    printer::{Advice, table},
    resolve, wire,
};

pub(crate) async fn run(here: &Invocation, verb: &Snapshot) -> Result<u8> {
    let engine = wire::open_engine(&here.config)?;
    match verb {
        Snapshot::Ls => {
            let mut snapshots = engine.snapshots().context("cannot list snapshots")?;
            snapshots.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created_at));
            let now = Timestamp::from(SystemTime::now());
            here.print.result(&snapshots, |snapshots| {
                let rows: Vec<_> = snapshots.iter().map(|snapshot| row(snapshot, now)).collect();
                table(&["ID", "OF", "LAYERS", "DURABLE", "AGE"], &rows)
            })?;
        }
        Snapshot::Rm { snapshots, force } => {
            let mut ids = Vec::new();
            for typed in snapshots {
                let id = resolve::snapshot(&engine, typed)?;
                if !force && engine.snapshot(&id)?.is_some_and(|snapshot| snapshot.of_sessions) {
                    let hint = "`harvest rm SESSION` and `harvest repo rm` forget theirs; --force insists";
                    bail!(Advice::new(format!("a session or repository may go on from {id}"), hint));
                }
                ids.push(id);
            }
            for id in &ids {
                engine.snapshot_remove(id).with_context(|| format!("cannot forget {id}"))?;
                here.print.note(format!("Forgot {id}"));
            }
            if here.print.json {
                here.print.result(&json!({ "removed": ids }), |_| String::new())?;
            }
        }
    }
    Ok(0)
}

fn row(snapshot: &harvest_engine::Snapshot, now: Timestamp) -> Vec<String> {
    let yes = |is: bool, word: &str, other: &str| if is { word } else { other }.to_owned();
    vec![
        snapshot.id.to_string(),
        yes(snapshot.of_sessions, "session", "you"),
        snapshot.layers.len().to_string(),
        yes(snapshot.durable, "yes", "not yet"),
        age(now.since(snapshot.created_at).as_secs()),
    ]
}
