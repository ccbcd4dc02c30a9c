//! `harvest volume`: creates, lists and removes volumes.

use anyhow::{Result, bail};
use harvest_proto::api::{CreateVolume, Page, Volume, VolumeBacking};
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    backend::Backend,
    cli::{VolumeCommand, units},
    confirm,
    printer::Advice,
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
            let headings = ["NAME", "USED", "SIZE", "FILES", "BACKING", "AGE"];
            ctx.print.list(&list(&backend).await?, headings, row)?;
        }
        VolumeCommand::Rm { names, yes } => {
            // All names are checked before the first volume is removed.
            let existing = list(&backend).await?;
            if let Some(missing) = names
                .iter()
                .find(|name| !existing.iter().any(|volume| volume.name == name.as_str()))
            {
                let hint = "`harvest volume ls` lists volumes";
                bail!(Advice::new(format!("there is no volume `{missing}`"), hint));
            }
            let all = names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            confirm::removal(ctx.print, yes, &format!("{all} with all files"))?;
            for name in &names {
                backend.delete(&format!("/v1/volumes/{name}")).await?;
                ctx.print.note(format!("Removed {name}"));
            }
            ctx.print.document(&json!({ "removed": names }))?;
        }
    }
    Ok(0)
}

async fn list(backend: &Backend) -> Result<Vec<Volume>> {
    Ok(backend.get::<Page<Volume>>("/v1/volumes").await?.items)
}

fn row(volume: &Volume) -> [String; 6] {
    let backing = match volume.backing {
        VolumeBacking::Image => "file system",
        VolumeBacking::Folder => "folder (limits not enforced)",
    };
    [
        volume.name.clone(),
        units::bytes(volume.used_bytes),
        units::bytes(volume.size_bytes),
        volume.files.to_string(),
        backing.to_owned(),
        age(volume.created_at),
    ]
}
