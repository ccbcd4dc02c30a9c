//! `harvest snapshot`: takes, lists, pins and removes snapshots.

use anyhow::{Result, bail};
use harvest_proto::{
    SessionId,
    api::{CreateSnapshot, Page, PinSnapshot, Snapshot, SnapshotOwner, StoredSnapshot},
};
use reqwest::Method;
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation, backend::Backend, cli::SnapshotCommand, confirm, printer::Advice,
    render::describe_snapshot_kind, resolve,
};

pub(crate) async fn run(ctx: &Invocation, verb: &SnapshotCommand) -> Result<u8> {
    match verb {
        SnapshotCommand::Create { session, name } => {
            return create(ctx, session, name.clone()).await;
        }
        SnapshotCommand::Ls { session: Some(session) } => return of_session(ctx, session).await,
        SnapshotCommand::Pin { at } => return pin(ctx, at, true).await,
        SnapshotCommand::Unpin { at } => return pin(ctx, at, false).await,
        SnapshotCommand::Ls { session: None } | SnapshotCommand::Rm { .. } => {}
    }
    let backend = Backend::find(&ctx.config)?;
    let snapshots = backend.get::<Page<StoredSnapshot>>("/v1/snapshots").await?.items;
    match verb {
        SnapshotCommand::Rm { snapshots: typed, force, yes } => {
            let mut ids = Vec::new();
            for typed in typed {
                let id = resolve::snapshot(&backend, typed).await?;
                let of_sessions =
                    |kept: &StoredSnapshot| kept.id == id && kept.owner == SnapshotOwner::Session;
                // Checked for all before the first snapshot is removed.
                if !force && snapshots.iter().any(of_sessions) {
                    let hint = "`harvest rm SESSION` and `harvest repo rm NAME` remove their snapshots; --force removes it anyway";
                    bail!(Advice::new(format!("a session or repository may need {id}"), hint));
                }
                ids.push(id);
            }
            let all = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            confirm::removal(ctx.print, *yes, &all)?;
            for id in &ids {
                backend.delete(&format!("/v1/snapshots/{id}?force={force}")).await?;
                ctx.print.note(format!("Removed {id}"));
            }
            ctx.print.document(&json!({ "removed": ids }))?;
        }
        _ => ctx.print.list(&snapshots, ["ID", "OWNER", "LAYERS", "DURABLE", "AGE"], row)?,
    }
    Ok(0)
}

/// Takes a snapshot of a session.
async fn create(ctx: &Invocation, session: &str, name: Option<String>) -> Result<u8> {
    let (client, session) = ctx.session(session).await?;
    let path = format!("/v1/sessions/{session}/snapshots");
    let taken: Snapshot = client.post(&path, &CreateSnapshot { name }).await?;
    ctx.print.result(&taken, |taken| format!("{}\n", taken.id))?;
    ctx.print.hint(format!("`harvest restore {session} --snapshot {}` goes back to it", taken.id));
    Ok(0)
}

/// Lists the snapshots of a session.
async fn of_session(ctx: &Invocation, session: &str) -> Result<u8> {
    let (client, session) = ctx.session(session).await?;
    let all: Vec<Snapshot> = client.all(&format!("/v1/sessions/{session}/snapshots")).await?;
    ctx.print.list(&all, ["ID", "KIND", "TURN", "PINNED", "AGE", "NAME…"], |one| {
        [
            one.id.to_string(),
            describe_snapshot_kind(one.kind).to_owned(),
            one.turn.map_or_else(String::new, |turn| turn.to_string()),
            if one.pinned { "yes" } else { "no" }.to_owned(),
            age(one.created_at),
            one.name.clone().unwrap_or_default(),
        ]
    })?;
    Ok(0)
}

/// Pins or unpins the snapshot at `SESSION@TURN`, or of the session's current state.
async fn pin(ctx: &Invocation, at: &str, pinned: bool) -> Result<u8> {
    let (typed, turn) = resolve::at_turn(at)?;
    let (client, session) = ctx.session(typed).await?;
    let path = format!("/v1/sessions/{session}/snapshots");
    let snapshot = match turn {
        None => client.session(&session).await?.snapshot_id,
        Some(turn) => {
            let all: Vec<Snapshot> = client.all(&path).await?;
            all.into_iter()
                .rfind(|snapshot| snapshot.turn == Some(turn))
                .map(|snapshot| snapshot.id)
        }
    };
    let Some(snapshot) = snapshot else { bail!(no_snapshot(&session, turn)) };
    let request = client.request(Method::PUT, &format!("{path}/{snapshot}"));
    let shown: Snapshot = client.call(request.json(&PinSnapshot { pinned })).await?;
    ctx.print.result(&shown, |shown| format!("{}\n", shown.id))?;
    let verb = if pinned { "Pinned" } else { "Unpinned" };
    ctx.print.note(format!("{verb} {snapshot}"));
    Ok(0)
}

fn no_snapshot(session: &SessionId, turn: Option<u32>) -> Advice {
    match turn {
        Some(0) => Advice::new(
            format!("{session} starts from its repositories, not from a snapshot"),
            format!("`harvest restore {session}@0` needs no pin"),
        ),
        _ => Advice::new(
            "the turn has no snapshot",
            format!("`harvest turns {session}` lists turns with their snapshots"),
        ),
    }
}

fn row(snapshot: &StoredSnapshot) -> [String; 5] {
    [
        snapshot.id.to_string(),
        match snapshot.owner {
            SnapshotOwner::Session => "session",
            SnapshotOwner::You => "you",
        }
        .to_owned(),
        snapshot.layers.len().to_string(),
        if snapshot.durable { "yes" } else { "not yet" }.to_owned(),
        age(snapshot.created_at),
    ]
}
