//! `harvest sandbox snapshot`, `restore` and `fork`.

use anyhow::{Result, bail};
use harvest_proto::api::{
    CreateSandbox, ForkSandbox, ForkedSandbox, RestoreSandbox, RestoredSandbox, SandboxSnapshot,
};
use serde_json::json;

use super::start_new;
use crate::{Invocation, backend::Backend, resolve};

pub(super) async fn snapshot(ctx: &Invocation, backend: &Backend, typed: &str) -> Result<()> {
    let id = resolve::sandbox(backend, typed).await?;
    let saved: SandboxSnapshot =
        backend.post(&format!("/v1/sandboxes/{id}/snapshot"), &json!({})).await?;
    ctx.print.result(&saved, |saved| format!("{}\n", saved.id))?;
    ctx.print.note(format!("Saved the disk of {id}; paused for {}ms", saved.frozen_millis));
    Ok(())
}

pub(super) async fn restore(ctx: &Invocation, backend: &Backend, what: &[String]) -> Result<()> {
    match what {
        [snapshot] => restore_new(ctx, backend, snapshot).await,
        [sandbox, snapshot] => restore_in_place(ctx, backend, sandbox, snapshot).await,
        _ => unreachable!("clap takes one or two arguments"),
    }
}

async fn restore_new(ctx: &Invocation, backend: &Backend, typed: &str) -> Result<()> {
    let snapshot = resolve::snapshot(backend, typed).await?;
    let request = CreateSandbox {
        from: Some(snapshot.clone()),
        state: Some(false),
        ..CreateSandbox::default()
    };
    let id = start_new(ctx, backend, &request).await?;
    ctx.print.result(&json!({ "id": id, "snapshot_id": snapshot }), |_| format!("{id}\n"))?;
    ctx.print.note(format!("Started {id} from {snapshot}"));
    Ok(())
}

async fn restore_in_place(
    ctx: &Invocation,
    backend: &Backend,
    sandbox: &str,
    snapshot: &str,
) -> Result<()> {
    let id = resolve::sandbox(backend, sandbox).await?;
    let snapshot = resolve::snapshot(backend, snapshot).await?;
    let restored: RestoredSandbox = backend
        .post(&format!("/v1/sandboxes/{id}/restore"), &RestoreSandbox { snapshot_id: snapshot })
        .await?;
    ctx.print.result(&restored, |restored| format!("{}\n", restored.id))?;
    let saved = restored.kept;
    ctx.print.note(format!("Restored {id}; its previous disk is saved as {saved}"));
    ctx.print.hint(format!("`harvest sandbox restore {id} {saved}` undoes this"));
    Ok(())
}

pub(super) async fn fork(
    ctx: &Invocation,
    backend: &Backend,
    typed: &str,
    count: u16,
) -> Result<()> {
    let id = resolve::sandbox(backend, typed).await?;
    let forked: ForkedSandbox = backend
        .post(&format!("/v1/sandboxes/{id}/fork"), &ForkSandbox { count: Some(count) })
        .await?;
    ctx.print
        .result(&forked, |forked| forked.forks.iter().map(|fork| format!("{fork}\n")).collect())?;
    match forked.failed {
        Some(failed) => bail!("{failed}"),
        None => Ok(()),
    }
}
