//! What is done with a sandbox's disk: kept, put back, multiplied.

use anyhow::{Context, Result, bail};
use harvest_engine::{Engine, Limits, Network, Origin, Owner, Spec};
use harvest_proto::{SandboxId, SnapshotId};
use serde_json::json;

use super::blocking;
use crate::{Invocation, printer::Advice, resolve};

pub(super) async fn snapshot(here: &Invocation, engine: Engine, typed: &str) -> Result<()> {
    let (id, snapshot) = (resolve::sandbox(&engine, typed)?, SnapshotId::random());
    let (sandbox, kept) = (id.clone(), snapshot.clone());
    let captured = blocking(&engine, move |engine| {
        let captured = engine.capture(&sandbox, &kept)?;
        // This process is about to exit, and with it the thread that would do it later.
        engine.snapshots_sync()?;
        Ok(captured)
    });
    let captured = captured.await.with_context(|| format!("cannot keep the disk of {id}"))?;
    let document = json!({
        "id": snapshot,
        "sandbox": id,
        "frozen_millis": captured.frozen_millis,
        "bytes": captured.bytes,
    });
    here.print.result(&document, |_| format!("{snapshot}\n"))?;
    here.print.note(format!("Kept the disk of {id}; it stood still for {}ms", captured.frozen_millis));
    Ok(())
}

pub(super) async fn restore(here: &Invocation, engine: Engine, what: &[String]) -> Result<()> {
    match what {
        [snapshot] => restore_anew(here, engine, snapshot).await,
        [sandbox, snapshot] => restore_in_place(here, engine, sandbox, snapshot).await,
        _ => bail!("clap gives one or two"),
    }
}

async fn restore_anew(here: &Invocation, engine: Engine, typed: &str) -> Result<()> {
    let snapshot = resolve::snapshot(&engine, typed)?;
    let id = SandboxId::random();
    let spec = Spec {
        id: id.clone(),
        from: Origin::Snapshot(snapshot.clone()),
        limits: Limits::default(),
        network: Network::Nothing,
        owner: Owner::Kept,
        binds: Vec::new(),
        volumes: Vec::new(),
        env: Default::default(),
    };
    blocking(&engine, move |engine| engine.start(&spec))
        .await
        .with_context(|| format!("cannot start from {snapshot}"))?;
    here.print.result(&json!({ "id": id, "snapshot": snapshot }), |_| format!("{id}\n"))?;
    here.print.note(format!("Started {id} from {snapshot}"));
    Ok(())
}

/// The old disk is a snapshot before anything of it is let go: a crash at any step loses nothing.
async fn restore_in_place(here: &Invocation, engine: Engine, sandbox: &str, snapshot: &str) -> Result<()> {
    let id = resolve::sandbox(&engine, sandbox)?;
    let snapshot = resolve::snapshot(&engine, snapshot)?;
    let before = engine.inspect(&id)?.with_context(|| format!("{id} is gone"))?;
    if before.spec.owner != Owner::Kept {
        let hint = "`harvest sandbox restore SNAPSHOT` starts another one from it";
        bail!(Advice::new(format!("{id} is not yours to put back"), hint));
    }
    let kept = SnapshotId::random();
    here.print.note(format!("Keeping the disk of {id} as {kept}"));
    let spec = Spec { from: Origin::Snapshot(snapshot.clone()), ..before.spec };
    let (sandbox, old) = (id.clone(), kept.clone());
    blocking(&engine, move |engine| engine.end_kept(&sandbox, &old).map(drop))
        .await
        .with_context(|| format!("cannot keep the disk of {id}; nothing was put back"))?;
    blocking(&engine, move |engine| {
        engine.start(&spec)?;
        engine.snapshots_sync()
    })
    .await
    .with_context(|| format!("cannot put {id} back to {snapshot}; what was on its disk is {kept}"))?;
    here.print.result(&json!({ "id": id, "snapshot": snapshot, "kept": kept }), |_| format!("{id}\n"))?;
    here.print.hint(format!("`harvest sandbox restore {id} {kept}` goes back to how it was"));
    Ok(())
}

pub(super) async fn fork(here: &Invocation, engine: Engine, typed: &str, count: u16) -> Result<()> {
    let id = resolve::sandbox(&engine, typed)?;
    let source = engine.inspect(&id)?.with_context(|| format!("{id} is gone"))?.spec;
    let snapshot = SnapshotId::random();
    let (sandbox, between) = (id.clone(), snapshot.clone());
    blocking(&engine, move |engine| engine.capture(&sandbox, &between))
        .await
        .with_context(|| format!("cannot keep the disk of {id}"))?;
    let mut forks = Vec::new();
    let mut failed = None;
    for _ in 0..count {
        let fork = SandboxId::random();
        let from = Origin::Snapshot(snapshot.clone());
        // Whoever forks a session's sandbox has one of their own: nobody serves its door.
        let network = if source.network == Network::Door { Network::Nothing } else { source.network };
        let spec = Spec { id: fork.clone(), from, network, owner: Owner::Kept, ..source.clone() };
        match blocking(&engine, move |engine| engine.start(&spec)).await {
            Ok(_) => forks.push(fork),
            Err(error) => {
                failed = Some(error.context(format!("started {} of {count} forks", forks.len())));
                break;
            }
        }
    }
    // What the forks stand on is theirs now; a name for it would only pile up.
    blocking(&engine, move |engine| engine.snapshot_remove(&snapshot)).await?;
    here.print.result(&json!({ "source": id, "forks": forks }), |_| {
        forks.iter().map(|fork| format!("{fork}\n")).collect()
    })?;
    failed.map_or(Ok(()), Err)
}
