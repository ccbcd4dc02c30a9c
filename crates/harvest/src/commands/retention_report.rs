//! The snapshots that sessions hold, and what retention removes: for `df` and `gc` with a running
//! server.

use anyhow::Result;
use harvest_proto::api::RetentionReport;
use serde_json::json;

use crate::{Invocation, cli::units::bytes, client::Client, table};

/// The snapshots that sessions hold; `None` without a server.
pub(crate) async fn fetch(ctx: &Invocation) -> Result<Option<RetentionReport>> {
    match Client::find(&ctx.config) {
        Ok(client) => client.retention().await.map(Some),
        // Without a server, the totals still contain the snapshots of sessions.
        Err(_) => Ok(None),
    }
}

/// Applies retention, or with `dry_run` only prints what it would remove.
pub(crate) async fn apply(ctx: &Invocation, dry_run: bool) -> Result<Option<RetentionReport>> {
    let Ok(client) = Client::find(&ctx.config) else { return Ok(None) };
    let retained: RetentionReport = match dry_run {
        true => client.retention().await?,
        false => client.post("/v1/retention", &json!({})).await?,
    };
    let verb = if dry_run { "Would remove" } else { "Removed" };
    for dropped in &retained.dropped {
        let what = match &dropped.snapshot_id {
            Some(snapshot) => format!("{snapshot} of {}", dropped.session),
            None => format!("{} with its snapshots and history", dropped.session),
        };
        let why = match dropped.why.as_str() {
            "archived" => "the session is archived and has a newer snapshot",
            "archived_long_ago" => "it was archived longer ago than retention.archived",
            "too_many" => "the session has more than retention.snapshots_per_session",
            "quota" => "snapshots take more than retention.snapshots_bytes",
            other => other,
        };
        ctx.print.note(format!("{verb} {what}: {why}"));
    }
    Ok(Some(retained))
}

/// The sessions with snapshots, largest first.
pub(crate) fn text(retained: &RetentionReport) -> String {
    let mut items: Vec<_> = retained.items.iter().filter(|held| held.snapshots > 0).collect();
    items.sort_by_key(|held| std::cmp::Reverse(held.bytes));
    let row = |held: &&harvest_proto::api::SessionDiskUsage| {
        [
            held.session.to_string(),
            held.snapshots.to_string(),
            held.pinned.to_string(),
            bytes(held.bytes),
            held.title.clone(),
        ]
    };
    table::plain(["SESSION", "SNAPSHOTS", "PINNED", "SIZE", "TITLE…"], items.iter().map(row))
}
