//! What sessions hold on the disk and what the rules of retention have go: for `df` and `gc`, when a
//! server runs.

use anyhow::Result;
use harvest_proto::api::Retained;

use crate::{
    Invocation, cli::units::bytes, client::Client, plain::plain_line, printer::table, render::cut,
};

/// What sessions hold; `None` when no server runs.
pub(crate) async fn look(here: &Invocation) -> Result<Option<Retained>> {
    match Client::find(&here.config) {
        Ok(client) => client.retention().await.map(Some),
        // Their names are the server's; what they hold is in the totals all the same.
        Err(_) => Ok(None),
    }
}

/// Has go what the rules say, or with `dry_run` only says it; answers what that is.
pub(crate) async fn keep_to_rules(here: &Invocation, dry_run: bool) -> Result<Option<Retained>> {
    let Ok(client) = Client::find(&here.config) else { return Ok(None) };
    let retained = if dry_run { client.retention().await? } else { client.retain().await? };
    let verb = if dry_run { "would go" } else { "went" };
    for dropped in &retained.dropped {
        let what = match &dropped.snapshot {
            Some(snapshot) => format!("{snapshot} of {}", dropped.session),
            None => format!("{} with all it holds", dropped.session),
        };
        let why = match dropped.why.as_str() {
            "archived" => "the session is archived, and this is not its newest",
            "archived_long_ago" => "it was archived long ago",
            "too_many" => "the session has more than retention.snapshots_per_session",
            "quota" => "snapshots take more than retention.snapshots_bytes",
            other => other,
        };
        here.print.note(format!("{what} {verb}: {why}"));
    }
    Ok(Some(retained))
}

/// Each session with what it holds, the largest first.
pub(crate) fn text(retained: &Retained) -> String {
    let mut items: Vec<_> = retained.items.iter().filter(|held| held.snapshots > 0).collect();
    items.sort_by_key(|held| std::cmp::Reverse(held.bytes));
    let row = |held: &&harvest_proto::api::Held| {
        vec![
            held.session.to_string(),
            held.snapshots.to_string(),
            held.pinned.to_string(),
            bytes(held.bytes),
            cut(&plain_line(&held.title), 50),
        ]
    };
    let rows: Vec<_> = items.iter().map(row).collect();
    table(&["SESSION", "SNAPSHOTS", "PINNED", "SIZE", "TITLE"], &rows)
}
