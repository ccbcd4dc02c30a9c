//! `harvest volume`: places that outlive sandboxes.

use std::time::SystemTime;

use anyhow::{Result, anyhow, bail};
use harvest_engine::{Backing, EngineError, Volume as Made, VolumeSpec};
use harvest_proto::Timestamp;
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    cli::{Volume, units},
    printer::{Advice, table},
    wire,
};

// Room for as many files as there are small ones in a cache; the engine refuses fewer than 1 KiB for each.
const BYTES_PER_FILE: u64 = 4096;

pub(crate) async fn run(here: &Invocation, verb: Volume) -> Result<u8> {
    let engine = wire::open_engine(&here.config)?;
    match verb {
        Volume::Create { name, size, files } => {
            let default = VolumeSpec::new(name);
            let files = files.unwrap_or(default.files.min(size.0 / BYTES_PER_FILE));
            let spec = VolumeSpec { size_bytes: size.0, files, ..default };
            // Making its file system takes a moment.
            let made = tokio::task::spawn_blocking(move || engine.volume_create(&spec)).await?;
            let made = made.map_err(explained)?;
            here.print.result(&made, |made| format!("{}\n", made.name))?;
            let hint = format!("`harvest exec --volume {}:/data -- COMMAND` uses it", made.name);
            here.print.hint(hint);
        }
        Volume::Ls => {
            let volumes = engine.volumes().map_err(explained)?;
            let now = Timestamp::from(SystemTime::now());
            here.print.result(&volumes, |volumes| {
                let rows: Vec<_> = volumes.iter().map(|volume| row(volume, now)).collect();
                table(&["NAME", "SIZE", "FILES", "KEPT AS", "AGE"], &rows)
            })?;
        }
        Volume::Rm { names } => {
            // All of them are looked up before the first goes.
            let there = engine.volumes().map_err(explained)?;
            if let Some(missing) = names.iter().find(|name| !there.iter().any(|volume| volume.name == **name))
            {
                let hint = "`harvest volume ls` lists those there are";
                bail!(Advice::new(format!("there is no volume `{missing}`"), hint));
            }
            for name in &names {
                engine.volume_remove(name).map_err(explained)?;
                here.print.note(format!("Removed {name}"));
            }
            if here.print.json {
                here.print.result(&json!({ "removed": names }), |_| String::new())?;
            }
        }
    }
    Ok(0)
}

/// With what to do next, where there is something.
pub(crate) fn explained(error: EngineError) -> anyhow::Error {
    let hint = match &error {
        EngineError::VolumeMissing { volume } => format!("`harvest volume create {volume}` makes it"),
        EngineError::VolumeInUse { .. } => "`harvest sandbox ls` shows who may have it".to_owned(),
        EngineError::VolumeExists { .. } => "`harvest volume ls` lists those there are".to_owned(),
        _ => return error.into(),
    };
    anyhow!(Advice::new(error.to_string(), hint))
}

fn row(volume: &Made, now: Timestamp) -> Vec<String> {
    let kept = match volume.backing {
        Backing::Image => "file system",
        Backing::Folder => "folder, limits not kept",
    };
    vec![
        volume.name.to_string(),
        units::bytes(volume.size_bytes),
        volume.files.to_string(),
        kept.to_owned(),
        age(now.since(volume.created_at).as_secs()),
    ]
}
