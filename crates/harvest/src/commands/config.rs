//! `harvest config`: prints settings and where each comes from.

use anyhow::{Result, bail};

use crate::{
    Invocation,
    cli::ConfigArgs,
    config::{origin::settings, process_env},
    printer::Advice,
};

pub(crate) fn run(ctx: &Invocation, args: &ConfigArgs) -> Result<u8> {
    let mut settings = settings(&ctx.config, &ctx.flags, &process_env)?;
    if let Some(key) = &args.key {
        settings.retain(|setting| setting.key == *key);
        let [setting] = settings.as_slice() else {
            bail!(Advice::new(
                format!("there is no key `{key}`"),
                "`harvest config` lists all keys"
            ));
        };
        ctx.print.result(setting, |setting| format!("{}\n", setting.value))?;
        return Ok(0);
    }
    ctx.print.list(&settings, ["KEY", "VALUE", "FROM"], |setting| {
        [setting.key.clone(), setting.value.clone(), setting.from.clone()]
    })?;
    Ok(0)
}
