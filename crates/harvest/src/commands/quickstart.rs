//! `harvest quickstart`: runs the demo or removes its data.

use anyhow::Result;

use crate::{Invocation, cli::QuickstartArgs, quickstart};

pub(crate) async fn run(ctx: &Invocation, args: &QuickstartArgs) -> Result<u8> {
    if !args.clean {
        return quickstart::run(ctx, args.keep).await;
    }
    let home = ctx.config.home.join("quickstart");
    match quickstart::clean(ctx, &home)? {
        true => ctx.print.note(format!("Removed {}", home.display())),
        false => ctx.print.note("Nothing to remove"),
    }
    Ok(0)
}
