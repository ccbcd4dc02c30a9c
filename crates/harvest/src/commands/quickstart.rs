//! `harvest quickstart`: runs the demo or removes its data.

use anyhow::Result;

use crate::{Invocation, cli::QuickstartArgs, quickstart};

pub(crate) async fn run(ctx: &Invocation, args: &QuickstartArgs) -> Result<u8> {
    if !args.clean {
        let agent = args.agent.as_deref().map(str::parse).transpose()?.unwrap_or_default();
        return quickstart::run(ctx, &agent, args.keep).await;
    }
    let home = ctx.config.home.join("quickstart");
    match quickstart::clean(ctx, &home)? {
        true => ctx.print.note(format!("Removed {}", home.display())),
        false => ctx.print.note("Nothing to remove"),
    }
    Ok(0)
}
