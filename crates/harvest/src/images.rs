//! Images: builds, pulls and imports them, with what happens meanwhile on the screen.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use harvest_engine::{
    BuildOptions, Engine, EngineError, Image, Import, Progress, PullOptions, Recipe, UnpackLimits,
};

use crate::{
    printer::{Advice, Printer, took},
    recipes,
};

// Cells of a bar.
const BAR: usize = 24;

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
    let built =
        blocking(engine, print, move |engine, tell| engine.image_build(&recipe, options, tell)).await?;
    built.map_err(advised).with_context(|| format!("cannot build the image `{named}`"))
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

/// Pulls an image from a registry.
pub(crate) async fn pull(
    engine: &Engine,
    reference: String,
    name: Option<String>,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    let limits = UnpackLimits { bytes: max_bytes, ..UnpackLimits::default() };
    let options = PullOptions { limits, ..PullOptions::default() };
    let pulled = blocking(engine, print, move |engine, tell| {
        engine.image_pull(&reference, name.as_deref(), &options, tell)
    });
    pulled.await?.map_err(advised)
}

/// Makes an image of an archive, a folder, or what comes on standard input.
pub(crate) async fn import(
    engine: &Engine,
    name: String,
    from: PathBuf,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    let limits = UnpackLimits { bytes: max_bytes, ..UnpackLimits::default() };
    if from.as_os_str() == "-" {
        let imported = blocking(engine, print, move |engine, tell| {
            let mut input = std::io::stdin().lock();
            let archive = Import::Archive { name: "standard input", bytes: &mut input, length: None };
            engine.image_import(&name, archive, limits, tell)
        });
        return imported.await?.map_err(advised);
    }
    let read = || format!("cannot read {}", from.display());
    let about = std::fs::metadata(&from).with_context(read)?;
    if about.is_dir() {
        let imported = blocking(engine, print, move |engine, tell| {
            engine.image_import(&name, Import::Folder(&from), limits, tell)
        });
        return imported.await?.map_err(advised);
    }
    let mut file = File::open(&from).with_context(read)?;
    let length = about.is_file().then_some(about.len());
    let imported = blocking(engine, print, move |engine, tell| {
        let shown = from.display().to_string();
        let archive = Import::Archive { name: &shown, bytes: &mut file, length };
        engine.image_import(&name, archive, limits, tell)
    });
    imported.await?.map_err(advised)
}

// The engine is synchronous, and this takes minutes.
async fn blocking<T: Send + 'static>(
    engine: &Engine,
    print: Printer,
    work: impl FnOnce(&Engine, &mut dyn FnMut(Progress)) -> T + Send + 'static,
) -> Result<T> {
    let engine = engine.clone();
    let done = tokio::task::spawn_blocking(move || {
        let mut screen = Screen { print, step: String::new(), at: (0, 1) };
        let done = work(&engine, &mut |progress| screen.tell(progress));
        print.moving("");
        done
    });
    Ok(done.await?)
}

// What a person can do about it.
fn advised(error: EngineError) -> anyhow::Error {
    let hint = match &error {
        EngineError::Build { hint, .. } => (*hint).to_owned(),
        EngineError::Unpack { source: harvest_engine::UnpackError::Owner { .. }, .. } => {
            "pack it with `tar --owner=0 --group=0`, or as the ids it has inside".to_owned()
        }
        EngineError::Unpack { source: harvest_engine::UnpackError::Limit { .. }, .. } => {
            "if it is what you want, say so with --max-size".to_owned()
        }
        EngineError::ImageMissing { image } => {
            format!("build it with `harvest image build {image}`, or pull it")
        }
        EngineError::File { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            "`harvest gc` removes what nothing uses".to_owned()
        }
        _ => return error.into(),
    };
    let told = Advice::new(error.to_string(), hint);
    match std::error::Error::source(&error).is_some() {
        true => anyhow::Error::new(error).context(told),
        false => told.into(),
    }
}

/// How far a build has come: lines that stay, and on a terminal one that moves.
struct Screen {
    print: Printer,
    step: String,
    at: (usize, usize),
}

impl Screen {
    fn tell(&mut self, progress: Progress) {
        match progress {
            Progress::Waiting { image } => self.note(&format!("  Waiting for another build of {image}")),
            Progress::StepStarted { index, total, what } => {
                self.step = format!("{index}/{total} {what}");
                self.at = (index, total);
                match self.print.moves() {
                    true => self.bar(self.share(), ""),
                    false => self.note(&format!("  Making {}", self.step)),
                }
            }
            Progress::StepDone { millis, .. } => {
                self.note(&format!("  Made {} in {}", self.step, took(millis)))
            }
            Progress::StepCached { index, total, what } if self.print.verbose => {
                self.note(&format!("  Found {index}/{total} {what}"));
            }
            Progress::Bytes { done, total } => self.bytes(done, total),
            Progress::Output { line } if self.print.verbose => self.note(&format!("  | {line}")),
            Progress::Output { line } => self.bar(self.share(), &line),
            Progress::StepCached { .. } => {}
        }
    }

    fn note(&self, line: &str) {
        self.print.moving("");
        self.print.note(line);
    }

    fn bytes(&self, done: u64, total: Option<u64>) {
        let share = total.filter(|total| *total > 0).map_or(0.0, |total| done as f64 / total as f64);
        let (index, steps) = self.at;
        let share = (index.saturating_sub(1) as f64 + share.min(1.0)) / steps as f64;
        self.bar(share, &format!("{} MB", done / 1_000_000));
    }

    // Steps before this one are done.
    fn share(&self) -> f64 {
        self.at.0.saturating_sub(1) as f64 / self.at.1 as f64
    }

    fn bar(&self, share: f64, aside: &str) {
        self.print.moving(&format!("  {} {}  {aside}", bar(share), self.step));
    }
}

fn bar(share: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the number of cells"
    )]
    let full = (share.clamp(0.0, 1.0) * BAR as f64) as usize;
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_empty_then_full_and_never_longer() {
        assert_eq!(bar(0.0), format!("[{}]", "-".repeat(BAR)));
        assert_eq!(bar(7.0), format!("[{}]", "#".repeat(BAR)));
        assert!([0.1, 0.5, f64::NAN].iter().all(|share| bar(*share).len() == BAR + 2));
    }
}
