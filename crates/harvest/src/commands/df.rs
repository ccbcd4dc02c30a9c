//! `harvest df`: what takes how much room, and what `harvest gc` would give back.

use anyhow::Result;
use harvest_proto::api::{
    Retained,
    machines::{DiskRoom, DiskUsage},
};
use serde::Serialize;

use super::held;
use crate::{Invocation, cli::units::bytes, desk::Desk, printer::table};

/// What a program is told.
#[derive(Debug, Serialize)]
struct Document {
    #[serde(flatten)]
    usage: DiskUsage,
    /// What sessions hold, when a server runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<Retained>,
}

pub(crate) async fn run(here: &Invocation) -> Result<u8> {
    let desk = Desk::find(&here.config)?;
    let document = Document { usage: desk.get("/v1/df").await?, sessions: held::look(here).await? };
    here.print.result(&document, |document| {
        let mut text = table(&["WHAT", "NUMBER", "SIZE"], &totals(document));
        if here.print.verbose {
            text += &format!("\n{}", table(&["WHAT", "NAME", "SIZE"], &each(&document.usage)));
            if let Some(sessions) = &document.sessions {
                text += &format!("\n{}", held::text(sessions));
            }
        }
        text
    })?;
    let usage = &document.usage;
    let at = |path: &std::path::Path| match desk.shares_our_files() {
        true => format!(" {}", path.display()),
        false => " of the server".to_owned(),
    };
    here.print.note(room("home", &at(&here.config.home), usage.home_disk));
    here.print.note(room("cache", &at(&here.config.cache), usage.cache_disk));
    if let Some(file) = usage.store_file {
        here.print.note(format!(
            "store file: {}, {} of it free",
            bytes(file.bytes),
            bytes(file.free_bytes)
        ));
    }
    if usage.reclaimable_bytes > 0 {
        here.print.hint(format!("`harvest gc` gives {} back", bytes(usage.reclaimable_bytes)));
    }
    Ok(0)
}

fn totals(Document { usage, sessions }: &Document) -> Vec<Vec<String>> {
    let sandboxes = usage.sandboxes.iter().map(|sandbox| sandbox.bytes).sum();
    let row = |what: &str, number: Option<usize>, size: u64| {
        vec![
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
        row("trash", None, usage.trash_bytes),
    ];
    // Part of the snapshots above it.
    rows.splice(2..2, of_sessions);
    rows
}

fn each(usage: &DiskUsage) -> Vec<Vec<String>> {
    let row = |what: &str, name: String, size: u64| vec![what.to_owned(), name, bytes(size)];
    let images = usage.images.iter().map(|image| row("image", image.name.clone(), image.bytes));
    let snapshots =
        usage.snapshots.iter().map(|kept| row("snapshot", kept.name.clone(), kept.bytes));
    let sandboxes = usage.sandboxes.iter().map(|sandbox| {
        let what = if sandbox.running { "sandbox" } else { "dead sandbox" };
        row(what, sandbox.id.to_string(), sandbox.bytes)
    });
    let volumes =
        usage.volumes.iter().map(|volume| row("volume", volume.name.clone(), volume.size_bytes));
    images.chain(snapshots).chain(sandboxes).chain(volumes).collect()
}

fn room(what: &str, at: &str, disk: DiskRoom) -> String {
    format!("{what}{at}: {} of {} free", bytes(disk.free_bytes), bytes(disk.total_bytes))
}
