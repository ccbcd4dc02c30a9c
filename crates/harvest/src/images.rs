//! Images: builds them from recipes, with what happens meanwhile on the screen.

use std::path::Path;

use anyhow::{Context, Result};
use harvest_engine::{BuildOptions, Engine, Image, Progress, Recipe};

use crate::{
    printer::{Printer, took},
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
