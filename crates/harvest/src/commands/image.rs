//! `harvest image`: what sandboxes start from.

use std::time::Instant;

use anyhow::Result;
use harvest_proto::api::{
    Page,
    machines::{Image as Made, ImageUsage, ImageUsers},
};
use serde_json::json;

use crate::{
    Invocation,
    cli::Image,
    desk::Desk,
    images,
    printer::{Advice, table, took},
};

pub(crate) async fn run(here: &Invocation, verb: Image) -> Result<u8> {
    let desk = Desk::find(&here.config)?;
    let (print, began) = (here.print, Instant::now());
    match verb {
        Image::Build { recipe, force } => {
            let image = images::build(&desk, &recipe, force, print).await?;
            done(here, "Built", &image, began)?;
            // Nothing else may need the zygote that the build's steps ran under.
            desk.rest().await?;
        }
        Image::Pull { reference, name, max_size } => {
            let image = images::pull(&desk, reference, name, max_size.0, print).await?;
            done(here, "Pulled", &image, began)?;
        }
        Image::Import { name, from, max_size } => {
            let image = images::import(&desk, name, &from, max_size.0, print).await?;
            done(here, "Imported", &image, began)?;
        }
        Image::Ls => {
            print.result(&list(&desk).await?, |images| {
                let rows: Vec<_> = images.iter().map(row).collect();
                table(&["NAME", "ID", "LAYERS", "SIZE", "CREATED"], &rows)
            })?;
        }
        Image::Inspect { name } => inspect(here, &desk, &find(&list(&desk).await?, &name)?).await?,
        Image::Rm { names } => {
            // All of them are looked up before the first goes.
            let images = list(&desk).await?;
            let images =
                names.iter().map(|name| find(&images, name)).collect::<Result<Vec<_>>>()?;
            for image in &images {
                remove(here, &desk, image).await?;
            }
        }
    }
    Ok(0)
}

async fn list(desk: &Desk) -> Result<Vec<Made>> {
    Ok(desk.get::<Page<Made>>("/v1/images").await?.items)
}

fn done(here: &Invocation, verb: &str, image: &Made, began: Instant) -> Result<()> {
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    here.print.result(image, |image| format!("{}\n", image.id))?;
    here.print.note(format!("{verb} {} ({}) in {time}", image.name, megabytes(image.bytes)));
    Ok(())
}

fn find(images: &[Made], named: &str) -> Result<Made> {
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

async fn inspect(here: &Invocation, desk: &Desk, image: &Made) -> Result<()> {
    let ImageUsage { layers, used_by } =
        desk.get(&format!("/v1/images/{}/usage", image.name)).await?;
    let mut document = serde_json::to_value(image)?;
    document["layers"] = json!(layers);
    document["used_by"] = json!(used_by);
    here.print.result(&document, |_| {
        let mut text = format!(
            "name        {}\nid          {}\nmade from   {}\ncreated     {}\nsize        {}\nkey         {}\nuser        {}\nworkdir     {}\n",
            image.name, image.id, image.source, image.created_at, megabytes(image.bytes), image.recipe_key,
            image.config.user, image.config.workdir
        );
        for (name, value) in &image.config.env {
            text += &format!("env         {name}={value}\n");
        }
        for layer in &layers {
            text += &format!("layer       {}  {}\n", layer.id, megabytes(layer.bytes));
        }
        text + &format!("also used   {}\n", said(&used_by).unwrap_or_else(|| "by nothing else".to_owned()))
    })
}

async fn remove(here: &Invocation, desk: &Desk, image: &Made) -> Result<()> {
    let users = desk.get::<ImageUsage>(&format!("/v1/images/{}/usage", image.name)).await?.used_by;
    desk.delete(&format!("/v1/images/{}", image.name)).await?;
    here.print
        .result(&json!({ "removed": image.name, "id": image.id, "used_by": users }), |_| {
            String::new()
        })?;
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
