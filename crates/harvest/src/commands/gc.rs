//! `harvest gc`: applies retention and removes unused layers and dead sandboxes.

use std::path::Path;

use anyhow::Result;
use harvest_proto::api::{CollectGarbage, GarbageReport, RetentionDrop};
use serde::Serialize;

use super::retention_report;
use crate::{Invocation, backend::Backend, cli::GcArgs, confirm, printer::count, server_process};

#[derive(Debug, Serialize)]
struct GcDocument<'a> {
    #[serde(flatten)]
    collected: &'a GarbageReport,
    /// What retention removed, if a server runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped: Option<Vec<RetentionDrop>>,
}

pub(crate) async fn run(ctx: &Invocation, args: &GcArgs) -> Result<u8> {
    if args.all {
        confirm::removal(ctx.print, args.yes, "every sandbox of this home with its disk")?;
        let removed = server_process::remove_all_sandboxes(&ctx.config)?;
        ctx.print.note(format!("Removed {}", count(removed as u64, "sandbox")));
    }
    // First, since retention makes more data unused.
    let retained = if args.all { None } else { retention_report::apply(ctx, args.dry_run).await? };
    let backend = Backend::find(&ctx.config)?;
    let collected: GarbageReport =
        backend.post("/v1/gc", &CollectGarbage { dry_run: args.dry_run }).await?;
    if args.all {
        // The collection has mounted a store in a file again.
        backend.stop_idle_zygote().await?;
    }
    let dropped = retained.map(|retained| retained.dropped);
    ctx.print.document(&GcDocument { collected: &collected, dropped })?;
    let verb = if args.dry_run { "Would remove" } else { "Removed" };
    let layers = count(collected.layers.len() as u64, "layer");
    let sandboxes = count(collected.sandboxes.len() as u64, "dead sandbox");
    let megabytes = collected.bytes / 1_000_000;
    ctx.print.note(format!("{verb} {layers} ({megabytes} MB) and {sandboxes}"));
    if collected.cache_busy {
        ctx.print.hint("an image build is running; the image cache was skipped");
    }
    if let Some(home) = &collected.cache_kept_for {
        ctx.print
            .warn(format!("the image cache was skipped: {home} uses it and is empty or missing"));
        ctx.print.hint(unblock_hint(home));
    }
    Ok(0)
}

/// How to unblock the cache: a home is dropped from the list once its folder is gone and its parent
/// folder exists.
fn unblock_hint(home: &str) -> String {
    let command = match Path::new(home).parent() {
        Some(parent) if !parent.is_dir() => format!("`mkdir -p {}`", parent.display()),
        _ => format!("`rmdir {home}`"),
    };
    format!("mount its disk; or, if it is gone for good, run {command} and `harvest gc` again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_names_command_for_missing_home() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().join("empty").display().to_string();
        assert!(unblock_hint(&empty).contains(&format!("`rmdir {empty}`")));
        let gone = folder.path().join("disk/home").display().to_string();
        assert!(
            unblock_hint(&gone)
                .contains(&format!("`mkdir -p {}`", folder.path().join("disk").display()))
        );
    }
}
