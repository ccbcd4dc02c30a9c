//! `harvest gc`: removes what nothing uses any more; never a layer in use.

use anyhow::{Context, Result};
use serde_json::json;

use super::held;
use crate::{Invocation, cli::Gc, wire};

pub(crate) async fn run(here: &Invocation, args: &Gc) -> Result<u8> {
    if args.all {
        let ended = wire::end_sandboxes(&here.config)?;
        here.print.note(format!("Ended {ended} sandboxes"));
    }
    let dry_run = args.dry_run;
    let retained = if args.all { None } else { held::keep_to_rules(here, dry_run).await? };
    let engine = wire::open_engine(&here.config)?;
    let collected =
        tokio::task::spawn_blocking(move || engine.gc(dry_run)).await?.context("cannot collect")?;
    let document = json!({
        "layers": collected.layers,
        "sandboxes": collected.sandboxes,
        "bytes": collected.bytes,
        "trees": collected.trees,
        "cache_busy": collected.cache_busy,
        "dropped": retained.map(|retained| retained.dropped),
    });
    here.print.result(&document, |_| String::new())?;
    let verb = if dry_run { "Would remove" } else { "Removed" };
    let (layers, sandboxes) = (collected.layers.len(), collected.sandboxes.len());
    let megabytes = collected.bytes / 1_000_000;
    here.print.note(format!("{verb} {layers} layers ({megabytes} MB) and {sandboxes} dead sandboxes"));
    if collected.cache_busy {
        here.print.hint("an image is being built; its cache was passed over");
    }
    Ok(0)
}
