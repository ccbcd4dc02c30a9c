//! What is done with a sandbox's disk: kept, put back, multiplied.

use anyhow::{Result, bail};
use harvest_proto::api::machines::{
    CreateSandbox, ForkSandbox, ForkedSandbox, RestoreSandbox, RestoredSandbox, SandboxSnapshot,
};
use serde_json::json;

use super::begin;
use crate::{Invocation, desk::Desk, resolve};

pub(super) async fn snapshot(here: &Invocation, desk: &Desk, typed: &str) -> Result<()> {
    let id = resolve::sandbox(desk, typed).await?;
    let kept: SandboxSnapshot =
        desk.post(&format!("/v1/sandboxes/{id}/snapshot"), &json!({})).await?;
    here.print.result(&kept, |kept| format!("{}\n", kept.id))?;
    here.print.note(format!("Kept the disk of {id}; it stood still for {}ms", kept.frozen_millis));
    Ok(())
}

pub(super) async fn restore(here: &Invocation, desk: &Desk, what: &[String]) -> Result<()> {
    match what {
        [snapshot] => restore_anew(here, desk, snapshot).await,
        [sandbox, snapshot] => restore_in_place(here, desk, sandbox, snapshot).await,
        _ => bail!("clap gives one or two"),
    }
}

async fn restore_anew(here: &Invocation, desk: &Desk, typed: &str) -> Result<()> {
    let snapshot = resolve::snapshot(desk, typed).await?;
    let order = CreateSandbox {
        from: Some(snapshot.clone()),
        state: Some(false),
        ..CreateSandbox::default()
    };
    let id = begin(here, desk, &order).await?;
    here.print.result(&json!({ "id": id, "snapshot": snapshot }), |_| format!("{id}\n"))?;
    here.print.note(format!("Started {id} from {snapshot}"));
    Ok(())
}

async fn restore_in_place(
    here: &Invocation,
    desk: &Desk,
    sandbox: &str,
    snapshot: &str,
) -> Result<()> {
    let id = resolve::sandbox(desk, sandbox).await?;
    let snapshot = resolve::snapshot(desk, snapshot).await?;
    let restored: RestoredSandbox =
        desk.post(&format!("/v1/sandboxes/{id}/restore"), &RestoreSandbox { snapshot }).await?;
    here.print.result(&restored, |restored| format!("{}\n", restored.id))?;
    let kept = restored.kept;
    here.print.note(format!("Kept what was on the disk of {id} as {kept}"));
    here.print.hint(format!("`harvest sandbox restore {id} {kept}` goes back to how it was"));
    Ok(())
}

pub(super) async fn fork(here: &Invocation, desk: &Desk, typed: &str, count: u16) -> Result<()> {
    let id = resolve::sandbox(desk, typed).await?;
    let forked: ForkedSandbox =
        desk.post(&format!("/v1/sandboxes/{id}/fork"), &ForkSandbox { count: Some(count) }).await?;
    here.print
        .result(&forked, |forked| forked.forks.iter().map(|fork| format!("{fork}\n")).collect())?;
    match forked.failed {
        Some(failed) => bail!("{failed}"),
        None => Ok(()),
    }
}
