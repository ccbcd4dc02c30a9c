//! `harvest gc`: removes what nothing uses any more; never a layer in use.

use anyhow::Result;
use harvest_proto::api::machines::{Collect, Collected};

use crate::{Invocation, cli::Gc, desk::Desk, wire};

pub(crate) async fn run(here: &Invocation, args: &Gc) -> Result<u8> {
    if args.all {
        let ended = wire::end_sandboxes(&here.config)?;
        here.print.note(format!("Ended {ended} sandboxes"));
    }
    let collected: Collected =
        Desk::find(&here.config)?.post("/v1/gc", &Collect { dry_run: args.dry_run }).await?;
    here.print.result(&collected, |_| String::new())?;
    let verb = if args.dry_run { "Would remove" } else { "Removed" };
    let (layers, sandboxes) = (collected.layers.len(), collected.sandboxes.len());
    let megabytes = collected.bytes / 1_000_000;
    here.print.note(format!("{verb} {layers} layers ({megabytes} MB) and {sandboxes} dead sandboxes"));
    if collected.cache_busy {
        here.print.hint("an image is being built; its cache was passed over");
    }
    Ok(0)
}
