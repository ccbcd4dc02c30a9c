//! `harvest image`: builds, pulls, imports, lists and removes images.

use std::time::Instant;

use anyhow::Result;
use harvest_proto::api::{Image, ImageUsage, ImageUsers, Page};
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    backend::Backend,
    cli::ImageCommand,
    images,
    printer::{Advice, count, human_elapsed},
};

pub(crate) async fn run(ctx: &Invocation, verb: ImageCommand) -> Result<u8> {
    let backend = Backend::find(&ctx.config)?;
    let (print, began) = (ctx.print, Instant::now());
    match verb {
        ImageCommand::Build { recipe, force, net } => {
            let image = images::build(&backend, &recipe, (force, net == "host"), print).await?;
            done(ctx, "Built", &image, began)?;
            // The build's steps ran below the zygote, which may be unused now.
            backend.stop_idle_zygote().await?;
        }
        ImageCommand::Pull { reference, name, max_size } => {
            let image = images::pull(&backend, reference, name, max_size.0, print).await?;
            done(ctx, "Pulled", &image, began)?;
        }
        ImageCommand::Import { name, from, max_size } => {
            let image = images::import(&backend, name, &from, max_size.0, print).await?;
            done(ctx, "Imported", &image, began)?;
        }
        ImageCommand::Ls => {
            let headings = ["NAME", "ID", "LAYERS", "SIZE", "AGE"];
            print.list(&list(&backend).await?, headings, row)?;
        }
        ImageCommand::Inspect { name } => {
            inspect(ctx, &backend, &find(&list(&backend).await?, &name)?).await?
        }
        ImageCommand::Rm { names } => {
            // All names are resolved before the first image is removed.
            let images = list(&backend).await?;
            let images =
                names.iter().map(|name| find(&images, name)).collect::<Result<Vec<_>>>()?;
            for image in &images {
                remove(ctx, &backend, image).await?;
            }
        }
    }
    Ok(0)
}

async fn list(backend: &Backend) -> Result<Vec<Image>> {
    Ok(backend.get::<Page<Image>>("/v1/images").await?.items)
}

fn done(ctx: &Invocation, verb: &str, image: &Image, began: Instant) -> Result<()> {
    let time = human_elapsed(began);
    ctx.print.result(image, |image| format!("{}\n", image.id))?;
    ctx.print.note(format!("{verb} {} ({}) in {time}", image.name, megabytes(image.bytes)));
    Ok(())
}

fn find(images: &[Image], typed: &str) -> Result<Image> {
    let found = images.iter().find(|image| image.name == typed || image.id.to_string() == typed);
    found.cloned().ok_or_else(|| {
        let names: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
        let hint = match names.is_empty() {
            true => "there are no images yet; `harvest image build` builds one".to_owned(),
            false => format!("images: {}", names.join(", ")),
        };
        Advice::new(format!("image `{typed}` is not on this host"), hint).into()
    })
}

async fn inspect(ctx: &Invocation, backend: &Backend, image: &Image) -> Result<()> {
    let ImageUsage { layers, used_by } =
        backend.get(&format!("/v1/images/{}/usage", image.name)).await?;
    let mut document = serde_json::to_value(image)?;
    document["layers"] = json!(layers);
    document["used_by"] = json!(used_by);
    ctx.print.result(&document, |_| {
        let mut text = format!(
            "name        {}\nid          {}\nsource      {}\ncreated     {}\nsize        {}\n\
             key         {}\nuser        {}\nworkdir     {}\n",
            image.name,
            image.id,
            image.source,
            image.created_at,
            megabytes(image.bytes),
            image.recipe_key,
            image.config.user,
            image.config.workdir
        );
        for (name, value) in &image.config.env {
            text += &format!("env         {name}={value}\n");
        }
        for layer in &layers {
            text += &format!("layer       {}  {}\n", layer.id, megabytes(layer.bytes));
        }
        let users = users_text(&used_by).unwrap_or_else(|| "nothing else".to_owned());
        text + &format!("used by     {users}\n")
    })
}

async fn remove(ctx: &Invocation, backend: &Backend, image: &Image) -> Result<()> {
    let users =
        backend.get::<ImageUsage>(&format!("/v1/images/{}/usage", image.name)).await?.used_by;
    backend.delete(&format!("/v1/images/{}", image.name)).await?;
    ctx.print.document(&json!({ "removed": image.name, "id": image.id, "used_by": users }))?;
    ctx.print.note(format!("Removed {}", image.name));
    match users_text(&users) {
        Some(users) => ctx.print.hint(format!("layers that are still used stay: {users}")),
        None => ctx.print.hint("`harvest gc` frees its layers"),
    }
    Ok(())
}

fn users_text(users: &ImageUsers) -> Option<String> {
    let mut parts = Vec::new();
    if !users.images.is_empty() {
        let noun = if users.images.len() == 1 { "image" } else { "images" };
        parts.push(format!("{noun} {}", users.images.join(", ")));
    }
    if !users.sandboxes.is_empty() {
        parts.push(count(users.sandboxes.len() as u64, "sandbox"));
    }
    if !users.snapshots.is_empty() {
        parts.push(count(users.snapshots.len() as u64, "snapshot"));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn row(image: &Image) -> [String; 5] {
    [
        image.name.clone(),
        image.id.to_string(),
        image.layers.len().to_string(),
        megabytes(image.bytes),
        age(image.created_at),
    ]
}

fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes / 1_000_000)
}
