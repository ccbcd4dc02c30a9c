//! `harvest volume`: creates, lists and removes volumes.

use std::time::SystemTime;

use anyhow::{Result, bail};
use harvest_proto::{
    Timestamp,
    api::{CreateVolume, Page, Volume, VolumeBacking},
};
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    backend::Backend,
    cli::{VolumeCommand, units},
    printer::{Advice, table},
};

pub(crate) async fn run(ctx: &Invocation, verb: VolumeCommand) -> Result<u8> {
    let backend = Backend::find(&ctx.config)?;
    match verb {
        VolumeCommand::Create { name, size, files } => {
            let request = CreateVolume { name: name.to_string(), size_bytes: Some(size.0), files };
            let created: Volume = backend.post("/v1/volumes", &request).await?;
            ctx.print.result(&created, |created| format!("{}\n", created.name))?;
            let hint = format!("`harvest exec --volume {}:/data -- COMMAND` uses it", created.name);
            ctx.print.hint(hint);
        }
        VolumeCommand::Ls => {
            let now = Timestamp::from(SystemTime::now());
            ctx.print.result(&list(&backend).await?, |volumes| {
                let rows: Vec<_> = volumes.iter().map(|volume| row(volume, now)).collect();
                table(&["NAME", "SIZE", "FILES", "BACKING", "AGE"], &rows)
            })?;
        }
        VolumeCommand::Rm { names } => {
            // All names are checked before the first volume is removed.
            let existing = list(&backend).await?;
            if let Some(missing) = names
                .iter()
                .find(|name| !existing.iter().any(|volume| volume.name == name.as_str()))
            {
                let hint = "`harvest volume ls` lists volumes";
                bail!(Advice::new(format!("there is no volume `{missing}`"), hint));
            }
            for name in &names {
                backend.delete(&format!("/v1/volumes/{name}")).await?;
                ctx.print.note(format!("Removed {name}"));
            }
            if ctx.print.json {
                ctx.print.result(&json!({ "removed": names }), |_| String::new())?;
            }
        }
    }
    Ok(0)
}

async fn list(backend: &Backend) -> Result<Vec<Volume>> {
    Ok(backend.get::<Page<Volume>>("/v1/volumes").await?.items)
}

fn row(volume: &Volume, now: Timestamp) -> Vec<String> {
    let backing = match volume.backing {
        VolumeBacking::Image => "file system",
        VolumeBacking::Folder => "folder (limits not enforced)",
    };
    vec![
        volume.name.clone(),
        units::bytes(volume.size_bytes),
        volume.files.to_string(),
        backing.to_owned(),
        age(now.since(volume.created_at).as_secs()),
    ]
}
