//! `harvest sync`: brings a session's checkouts up to date with their bases.

use std::time::Instant;

use anyhow::{Context, Result};
use harvest_proto::{
    StateReason,
    api::{SessionState, SyncedSession},
};
use serde_json::json;

use super::{FAILED, NEEDS_INPUT};
use crate::{
    Invocation, cli::SessionArg, printer::human_elapsed, render::synced_checkout,
    sanitize::sanitize_line,
};

pub(crate) async fn run(ctx: &Invocation, args: &SessionArg) -> Result<u8> {
    let (client, id) = ctx.session(&args.session).await?;
    let began = Instant::now();
    let done: SyncedSession = client
        .post(&format!("/v1/sessions/{id}/sync"), &json!({}))
        .await
        .with_context(|| format!("cannot sync {id}"))?;
    let time = human_elapsed(began);
    ctx.print.result(&done, |done| {
        let lines = done.checkouts.iter().flat_map(synced_checkout);
        lines.map(|line| sanitize_line(&line) + "\n").collect()
    })?;
    let (state, reason) = (done.session.state, done.session.reason);
    if done.synced {
        ctx.print.note(format!("Synced {id} in {time}: {}", state.as_str()));
        return Ok(0);
    }
    ctx.print.note(format!("{id} is not synced: {} ({reason})", state.as_str()));
    let needs_input = state == SessionState::NeedsInput;
    if needs_input && reason == StateReason::Conflict {
        let prompt = "rebase onto the base and resolve the conflicts";
        ctx.print.hint(format!("`harvest send {id} \"{prompt}\"` lets the agent resolve it"));
    }
    Ok(if needs_input { NEEDS_INPUT } else { FAILED })
}
