//! Images: builds them from recipes, with what happens meanwhile on the screen.

use std::path::Path;

use anyhow::{Context, Result};
use harvest_engine::{BuildOptions, Engine, Image, Progress, Recipe};

use crate::{
    printer::{Advice, Printer, took},
    recipes,
};

/// Builds the image of a recipe that comes along, or of a file. What has not changed is not made again.
pub(crate) async fn build(
    engine: &Engine,
    home: &Path,
    named: &str,
    options: BuildOptions,
    print: Printer,
) -> Result<Image> {
    let path = recipes::find(home, named)?;
    let recipe = Recipe::read(&path).with_context(|| format!("cannot use {}", path.display()))?;
    let engine = engine.clone();
    // The engine is synchronous, and a build takes minutes.
    let built = tokio::task::spawn_blocking(move || {
        let mut step = String::new();
        engine.image_build(&recipe, options, &mut |progress| tell(print, &mut step, progress))
    });
    built.await?.with_context(|| format!("cannot build the image `{named}`"))
}

/// Sees to it that there is an image of this name, or of this recipe's file: one that is missing is built,
/// if a recipe has its name. Answers what it is called.
pub(crate) async fn ensure(engine: &Engine, home: &Path, named: &str, print: Printer) -> Result<String> {
    let is_file = named.ends_with(".toml");
    if !is_file && engine.image(named).context("cannot look for the image")?.is_some() {
        return Ok(named.to_owned());
    }
    if recipes::find(home, named).is_err() {
        let hint = "`harvest image ls` lists those there are, `harvest image build FILE.toml` makes one";
        return Err(Advice::new(format!("there is no image `{named}`"), hint).into());
    }
    let began = std::time::Instant::now();
    if !is_file {
        print.note(format!("Building the image {named}, which takes minutes the first time"));
    }
    let image = build(engine, home, named, BuildOptions { force: false }, print).await?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    print.note(format!("Built {} in {time}", image.name));
    Ok(image.name)
}

fn tell(print: Printer, step: &mut String, progress: Progress) {
    match progress {
        Progress::Waiting { image } => print.note(format!("  Waiting for another build of {image}")),
        Progress::StepStarted { index, total, what } => {
            *step = format!("{index}/{total} {what}");
            print.note(format!("  Making {step}"));
        }
        Progress::StepDone { millis, .. } => print.note(format!("  Made {step} in {}", took(millis))),
        Progress::StepCached { index, total, what } if print.verbose => {
            print.note(format!("  Found {index}/{total} {what}"));
        }
        Progress::Output { line } if print.verbose => print.note(format!("  | {line}")),
        Progress::StepCached { .. } | Progress::Output { .. } => {}
    }
}
