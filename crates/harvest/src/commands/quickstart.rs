//! `harvest quickstart`: everything once, or the removal of what that made.

use anyhow::Result;

use crate::{Invocation, cli::Quickstart, quickstart};

pub(crate) async fn run(here: &Invocation, args: &Quickstart) -> Result<u8> {
    if !args.clean {
        return quickstart::run(here, args.keep).await;
    }
    let home = here.config.home.join("quickstart");
    match quickstart::clean(here, &home)? {
        true => here.print.note(format!("Removed {}", home.display())),
        false => here.print.note("Nothing to remove"),
    }
    Ok(0)
}
