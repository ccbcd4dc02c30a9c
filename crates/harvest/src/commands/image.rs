//! `harvest image`: what sandboxes start from.

use std::time::Instant;

use anyhow::{Context, Result};
use harvest_engine::BuildOptions;

use crate::{
    Invocation,
    cli::Image,
    images,
    printer::{table, took},
    wire,
};

pub(crate) async fn run(here: &Invocation, verb: Image) -> Result<u8> {
    let engine = wire::open_engine(&here.config)?;
    match verb {
        Image::Build { recipe, force } => {
            let began = Instant::now();
            let options = BuildOptions { force };
            let image = images::build(&engine, &here.config.home, &recipe, options, here.print).await?;
            let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
            here.print.result(&image, |image| format!("{}\n", image.id))?;
            here.print.note(format!("Built {} ({}) in {time}", image.name, megabytes(image.bytes)));
            // Nothing else may need the zygote that the build's steps ran under.
            tokio::task::spawn_blocking(move || engine.rest()).await?.context("cannot let the zygote go")?;
        }
        Image::Ls => {
            let images = engine.images().context("cannot list images")?;
            here.print.result(&images, |images| {
                let rows: Vec<_> = images.iter().map(row).collect();
                table(&["NAME", "ID", "LAYERS", "SIZE", "CREATED"], &rows)
            })?;
        }
    }
    Ok(0)
}

fn row(image: &harvest_engine::Image) -> Vec<String> {
    vec![
        image.name.clone(),
        image.id.to_string(),
        image.layers.len().to_string(),
        megabytes(image.bytes),
        image.created_at.to_string(),
    ]
}

fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes / 1_000_000)
}
