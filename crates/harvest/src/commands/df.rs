//! `harvest df`: prints disk usage and what `harvest gc` would free.

use anyhow::Result;
use harvest_proto::api::{DiskSpace, DiskUsage, RetentionReport};
use serde::Serialize;

use super::retention_report;
use crate::{Invocation, backend::Backend, cli::units::bytes, table};

#[derive(Debug, Serialize)]
struct DfDocument {
    #[serde(flatten)]
    usage: DiskUsage,
    /// Snapshots of sessions, if a server runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<RetentionReport>,
}

pub(crate) async fn run(ctx: &Invocation) -> Result<u8> {
    let backend = Backend::find(&ctx.config)?;
    let document = DfDocument {
        usage: backend.get("/v1/df").await?,
        sessions: retention_report::fetch(ctx).await?,
    };
    ctx.print.result(&document, |document| {
        let mut text = table::plain(["WHAT", "NUMBER", "SIZE"], totals(document));
        if ctx.print.verbose {
            text +=
                &format!("\n{}", table::plain(["WHAT", "NAME…", "SIZE"], items(&document.usage)));
            if let Some(sessions) = &document.sessions {
                text += &format!("\n{}", retention_report::text(sessions));
            }
        }
        text
    })?;
    let usage = &document.usage;
    let at = |path: &std::path::Path| match backend.shares_filesystem() {
        true => format!(" {}", path.display()),
        false => " of the server".to_owned(),
    };
    ctx.print.note(disk_line("home", &at(&ctx.config.home), usage.home_disk));
    ctx.print.note(disk_line("cache", &at(&ctx.config.cache), usage.cache_disk));
    if let Some(file) = usage.store_file {
        ctx.print.note(format!(
            "store file: {}, {} of it free",
            bytes(file.bytes),
            bytes(file.free_bytes)
        ));
    }
    if usage.reclaimable_bytes > 0 {
        ctx.print.hint(format!("`harvest gc` frees {}", bytes(usage.reclaimable_bytes)));
    }
    Ok(0)
}

fn totals(DfDocument { usage, sessions }: &DfDocument) -> Vec<[String; 3]> {
    let sandboxes = usage.sandboxes.iter().map(|sandbox| sandbox.bytes).sum();
    let row = |what: &str, number: Option<usize>, size: u64| {
        [
            what.to_owned(),
            number.map_or_else(|| "–".to_owned(), |number| number.to_string()),
            bytes(size),
        ]
    };
    let of_sessions = sessions
        .iter()
        .map(|held| row("of sessions", Some(held.items.len()), held.snapshots_bytes));
    let mut rows = vec![
        row("images", Some(usage.images.len()), usage.images_bytes),
        row("snapshots", Some(usage.snapshots.len()), usage.snapshots_bytes),
        row("sandboxes", Some(usage.sandboxes.len()), sandboxes),
        row("volumes", Some(usage.volumes.len()), usage.volumes_bytes),
        row("local forge", None, usage.forge_bytes),
        row("trash", None, usage.trash_bytes),
    ];
    // A part of the snapshots' row above.
    rows.splice(2..2, of_sessions);
    rows
}

fn items(usage: &DiskUsage) -> Vec<[String; 3]> {
    let row = |what: &str, name: String, size: u64| [what.to_owned(), name, bytes(size)];
    let images = usage.images.iter().map(|image| row("image", image.name.clone(), image.bytes));
    let snapshots = usage
        .snapshots
        .iter()
        .map(|snapshot| row("snapshot", snapshot.name.clone(), snapshot.bytes));
    let sandboxes = usage.sandboxes.iter().map(|sandbox| {
        let what = if sandbox.running { "sandbox" } else { "dead sandbox" };
        row(what, sandbox.id.to_string(), sandbox.bytes)
    });
    let volumes = usage.volumes.iter().map(|volume| {
        let owner = volume.owner.as_ref().map(|owner| format!(" (/mnt/state of {owner})"));
        row("volume", volume.name.clone() + &owner.unwrap_or_default(), volume.used_bytes)
    });
    images.chain(snapshots).chain(sandboxes).chain(volumes).collect()
}

fn disk_line(what: &str, at: &str, disk: DiskSpace) -> String {
    format!("{what}{at}: {} of {} free", bytes(disk.free_bytes), bytes(disk.total_bytes))
}
