//! `harvest image`: what sandboxes start from.

use std::time::Instant;

use anyhow::{Context, Result};
use harvest_engine::{BuildOptions, Engine, Image as Made, ImageUsers};
use serde_json::json;

use crate::{
    Invocation,
    cli::Image,
    images,
    printer::{Advice, table, took},
    wire,
};

pub(crate) async fn run(here: &Invocation, verb: Image) -> Result<u8> {
    let engine = wire::open_engine(&here.config)?;
    let (home, print, began) = (&here.config.home, here.print, Instant::now());
    match verb {
        Image::Build { recipe, force } => {
            let image = images::build(&engine, home, &recipe, BuildOptions { force }, print).await?;
            done(here, "Built", &image, began)?;
            // Nothing else may need the zygote that the build's steps ran under.
            tokio::task::spawn_blocking(move || engine.rest()).await?.context("cannot let the zygote go")?;
        }
        Image::Pull { reference, name, max_size } => {
            let image = images::pull(&engine, reference, name, max_size.0, print).await?;
            done(here, "Pulled", &image, began)?;
        }
        Image::Import { name, from, max_size } => {
            let image = images::import(&engine, name, from, max_size.0, print).await?;
            done(here, "Imported", &image, began)?;
        }
        Image::Ls => {
            let images = engine.images().context("cannot list images")?;
            print.result(&images, |images| {
                let rows: Vec<_> = images.iter().map(row).collect();
                table(&["NAME", "ID", "LAYERS", "SIZE", "CREATED"], &rows)
            })?;
        }
        Image::Inspect { name } => inspect(here, &engine, &find(&engine, &name)?)?,
        Image::Rm { names } => {
            // All of them are looked up before the first goes.
            let images = names.iter().map(|name| find(&engine, name)).collect::<Result<Vec<_>>>()?;
            for image in &images {
                remove(here, &engine, image)?;
            }
        }
    }
    Ok(0)
}

fn done(here: &Invocation, verb: &str, image: &Made, began: Instant) -> Result<()> {
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print.result(image, |image| format!("{}\n", image.id))?;
    here.print.note(format!("{verb} {} ({}) in {time}", image.name, megabytes(image.bytes)));
    Ok(())
}

fn find(engine: &Engine, named: &str) -> Result<Made> {
    let images = engine.images().context("cannot list images")?;
    let found = images.iter().find(|image| image.name == named || image.id.to_string() == named);
    found.cloned().ok_or_else(|| {
        let names: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
        let hint = match names.is_empty() {
            true => "there are none yet: build one with `harvest image build`".to_owned(),
            false => format!("there are {}", names.join(", ")),
        };
        Advice::new(format!("image `{named}` is not on this host"), hint).into()
    })
}

fn inspect(here: &Invocation, engine: &Engine, image: &Made) -> Result<()> {
    let layers = engine.image_layers(image).context("cannot look at its layers")?;
    let users = engine.image_users(image).context("cannot find who uses it")?;
    let sized: Vec<_> = layers.iter().map(|(id, bytes)| json!({ "id": id, "bytes": bytes })).collect();
    let mut document = serde_json::to_value(image)?;
    document["layers"] = json!(sized);
    document["used_by"] = json!(users);
    here.print.result(&document, |_| {
        let mut text = format!(
            "name        {}\nid          {}\nmade from   {}\ncreated     {}\nsize        {}\nkey         {}\nuser        {}\nworkdir     {}\n",
            image.name, image.id, image.source, image.created_at, megabytes(image.bytes), image.recipe_key,
            image.config.user, image.config.workdir
        );
        for (name, value) in &image.config.env {
            text += &format!("env         {name}={value}\n");
        }
        for (id, bytes) in &layers {
            text += &format!("layer       {id}  {}\n", megabytes(*bytes));
        }
        text + &format!("also used   {}\n", said(&users).unwrap_or_else(|| "by nothing else".to_owned()))
    })
}

fn remove(here: &Invocation, engine: &Engine, image: &Made) -> Result<()> {
    let users = engine.image_users(image).context("cannot find who uses it")?;
    engine.image_remove(&image.name).with_context(|| format!("cannot remove the image `{}`", image.name))?;
    here.print
        .result(&json!({ "removed": image.name, "id": image.id, "used_by": users }), |_| String::new())?;
    here.print.note(format!("Removed {}", image.name));
    match said(&users) {
        Some(users) => here.print.hint(format!("layers it shares stay: they are used {users}")),
        None => here.print.hint("`harvest gc` frees its layers"),
    }
    Ok(())
}

fn said(users: &ImageUsers) -> Option<String> {
    let mut parts = Vec::new();
    if !users.images.is_empty() {
        parts.push(format!("by the images {}", users.images.join(", ")));
    }
    if !users.sandboxes.is_empty() {
        parts.push(format!("by {} sandboxes", users.sandboxes.len()));
    }
    if !users.snapshots.is_empty() {
        parts.push(format!("by {} snapshots", users.snapshots.len()));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn row(image: &Made) -> Vec<String> {
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
