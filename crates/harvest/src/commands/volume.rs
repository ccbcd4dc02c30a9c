//! `harvest volume`: places that outlive sandboxes.

use std::time::SystemTime;

use anyhow::{Result, bail};
use harvest_proto::{
    Timestamp,
    api::{
        Page,
        machines::{CreateVolume, Volume as Made, VolumeBacking},
    },
};
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    cli::{Volume, units},
    desk::Desk,
    printer::{Advice, table},
};

pub(crate) async fn run(here: &Invocation, verb: Volume) -> Result<u8> {
    let desk = Desk::find(&here.config)?;
    match verb {
        Volume::Create { name, size, files } => {
            let order = CreateVolume { name: name.to_string(), size_bytes: Some(size.0), files };
            let made: Made = desk.post("/v1/volumes", &order).await?;
            here.print.result(&made, |made| format!("{}\n", made.name))?;
            let hint = format!("`harvest exec --volume {}:/data -- COMMAND` uses it", made.name);
            here.print.hint(hint);
        }
        Volume::Ls => {
            let now = Timestamp::from(SystemTime::now());
            here.print.result(&list(&desk).await?, |volumes| {
                let rows: Vec<_> = volumes.iter().map(|volume| row(volume, now)).collect();
                table(&["NAME", "SIZE", "FILES", "KEPT AS", "AGE"], &rows)
            })?;
        }
        Volume::Rm { names } => {
            // All of them are looked up before the first goes.
            let there = list(&desk).await?;
            if let Some(missing) =
                names.iter().find(|name| !there.iter().any(|volume| volume.name == name.as_str()))
            {
                let hint = "`harvest volume ls` lists those there are";
                bail!(Advice::new(format!("there is no volume `{missing}`"), hint));
            }
            for name in &names {
                desk.delete(&format!("/v1/volumes/{name}")).await?;
                here.print.note(format!("Removed {name}"));
            }
            if here.print.json {
                here.print.result(&json!({ "removed": names }), |_| String::new())?;
            }
        }
    }
    Ok(0)
}

async fn list(desk: &Desk) -> Result<Vec<Made>> {
    Ok(desk.get::<Page<Made>>("/v1/volumes").await?.items)
}

fn row(volume: &Made, now: Timestamp) -> Vec<String> {
    let kept = match volume.backing {
        VolumeBacking::Image => "file system",
        VolumeBacking::Folder => "folder, limits not kept",
    };
    vec![
        volume.name.clone(),
        units::bytes(volume.size_bytes),
        volume.files.to_string(),
        kept.to_owned(),
        age(now.since(volume.created_at).as_secs()),
    ]
}
