//! `harvest backup`: saves an installation to a file, and loads one.

use std::{
    path::Path,
    time::{Instant, SystemTime},
};

use anyhow::Result;

use crate::{
    Invocation,
    backup::{
        create::{self, Parts},
        load,
    },
    cli::{BackupCommand, units::bytes},
    printer::{count, human_elapsed},
};

pub(crate) async fn run(ctx: &Invocation, verb: &BackupCommand) -> Result<u8> {
    match verb {
        BackupCommand::Create { file, without_snapshots, without_images } => {
            let parts = Parts { snapshots: !without_snapshots, images: !without_images };
            create(ctx, file.as_deref(), parts).await
        }
        BackupCommand::Load { file } => load(ctx, file),
    }
}

async fn create(ctx: &Invocation, file: Option<&Path>, parts: Parts) -> Result<u8> {
    let began = Instant::now();
    let default = create::default_name(SystemTime::now().into());
    let created = create::create(ctx, file.unwrap_or(&default), parts).await;
    let created = created.map_err(create::explain)?;
    ctx.print.result(&created, |created| format!("{}\n", created.file.display()))?;
    for warning in create::warnings(&created) {
        ctx.print.warn(warning);
    }
    ctx.print.note(format!(
        "Saved {} in {}: {}, SHA-256 {}",
        count(created.about.snapshots as u64, "snapshot"),
        human_elapsed(began),
        bytes(created.bytes),
        created.sha256
    ));
    ctx.print.warn("the file holds the key of all secrets, and a token: keep it like a password");
    ctx.print.hint("`harvest --home FOLDER backup load FILE` makes a new home of it");
    Ok(0)
}

fn load(ctx: &Invocation, file: &Path) -> Result<u8> {
    let began = Instant::now();
    let loaded = load::load(ctx, file)?;
    ctx.print.result(&loaded, |loaded| format!("{}\n", loaded.home.display()))?;
    ctx.print.note(format!(
        "Loaded the backup of {} in {}: {}, {}",
        loaded.about.created_at,
        human_elapsed(began),
        count(loaded.about.snapshots as u64, "snapshot"),
        count(loaded.about.layers as u64, "layer"),
    ));
    if loaded.missing_layers > 0 {
        let layers = count(loaded.missing_layers as u64, "layer");
        ctx.print.warn(format!("{layers} of its snapshots are not on this machine"));
        ctx.print.hint("build the images that the sessions used: `harvest image build NAME`");
    }
    if let Some(settings) = &loaded.settings {
        ctx.print.note(format!(
            "Its settings are in {}; no command reads them there",
            settings.display()
        ));
    }
    ctx.print.hint("start it with `harvest up -d`, and only where the saved one does not run");
    Ok(0)
}
