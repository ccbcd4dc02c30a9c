//! `harvest gc`: removes what nothing uses any more; never a layer in use.

use std::path::Path;

use anyhow::Result;
use harvest_proto::api::{
    Dropped,
    machines::{Collect, Collected},
};
use serde::Serialize;

use super::held;
use crate::{Invocation, cli::Gc, desk::Desk, wire};

/// What a program is told.
#[derive(Debug, Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    collected: &'a Collected,
    /// What the rules of retention had go, when a server runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped: Option<Vec<Dropped>>,
}

pub(crate) async fn run(here: &Invocation, args: &Gc) -> Result<u8> {
    if args.all {
        let ended = wire::end_sandboxes(&here.config)?;
        here.print.note(format!("Ended {ended} sandboxes"));
    }
    // First: what the rules have go is nobody's then.
    let retained = if args.all { None } else { held::keep_to_rules(here, args.dry_run).await? };
    let collected: Collected =
        Desk::find(&here.config)?.post("/v1/gc", &Collect { dry_run: args.dry_run }).await?;
    let dropped = retained.map(|retained| retained.dropped);
    here.print.result(&Document { collected: &collected, dropped }, |_| String::new())?;
    let verb = if args.dry_run { "Would remove" } else { "Removed" };
    let (layers, sandboxes) = (collected.layers.len(), collected.sandboxes.len());
    let megabytes = collected.bytes / 1_000_000;
    here.print
        .note(format!("{verb} {layers} layers ({megabytes} MB) and {sandboxes} dead sandboxes"));
    if collected.cache_busy {
        here.print.hint("an image is being built; its cache was passed over");
    }
    if let Some(home) = &collected.cache_kept_for {
        here.print.warn(format!(
            "the image cache was passed over for the sake of {home}, which is empty or gone"
        ));
        here.print.hint(way_on(home));
    }
    Ok(0)
}

/// What to do about a home that keeps the cache from being collected: once its folder is gone, and the one it
/// was in is not, it is forgotten.
fn way_on(home: &str) -> String {
    let way = match Path::new(home).parent() {
        Some(parent) if !parent.is_dir() => format!("`mkdir -p {}`", parent.display()),
        _ => format!("`rmdir {home}`"),
    };
    format!("attach its disk; or, if it is gone for good, {way} and collect again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_that_keeps_the_cache_is_told_how_to_be_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().join("empty").display().to_string();
        assert!(way_on(&empty).contains(&format!("`rmdir {empty}`")));
        let gone = folder.path().join("disk/home").display().to_string();
        assert!(
            way_on(&gone).contains(&format!("`mkdir -p {}`", folder.path().join("disk").display()))
        );
    }
}
