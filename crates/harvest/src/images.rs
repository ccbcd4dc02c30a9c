//! Builds, pulls and imports images on the backend and shows the progress.

use std::{fs::File, io::Read, path::Path, time::Instant};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, stream};
use harvest_proto::{
    AgentName,
    api::{CreateImage, Image, ImageLine, ImageSource},
};
use harvest_server::in_process::{ByteStream, RequestBody};
use harvest_session::{ALL_AGENTS, default_image};
use reqwest::Method;
use tokio::sync::mpsc;

use crate::{
    backend::Backend,
    client::{path_segment, query},
    follow::Lines,
    printer::{Advice, ApiRefusal, Printer, human_elapsed, human_millis},
    remote_fs::feed,
};

const CHUNK_BYTES: usize = 256 * 1024;

/// Builds an image from a built-in recipe or a recipe file. Unchanged steps come from the cache.
pub(crate) async fn build(
    backend: &Backend,
    named: &str,
    (force, host_network): (bool, bool),
    print: Printer,
) -> Result<Image> {
    follow(start_build(backend, named, force, host_network).await?, print).await
}

async fn start_build(
    backend: &Backend,
    named: &str,
    force: bool,
    host_network: bool,
) -> Result<Lines> {
    let from = match named.ends_with(".toml") {
        true => recipe_file(backend, Path::new(named))?,
        false => ImageSource::Recipe(named.to_owned()),
    };
    make(backend, &CreateImage { from, name: None, force, host_network, max_bytes: None }).await
}

/// A recipe file by its path, or by its contents if the backend has another file system.
fn recipe_file(backend: &Backend, path: &Path) -> Result<ImageSource> {
    let read = || format!("cannot read {}", path.display());
    if !backend.shares_filesystem() {
        return Ok(ImageSource::Text(std::fs::read_to_string(path).with_context(read)?));
    }
    Ok(ImageSource::File(absolute_path(path)?))
}

fn absolute_path(path: &Path) -> Result<String> {
    let absolute =
        path.canonicalize().with_context(|| format!("cannot read {}", path.display()))?;
    absolute.into_os_string().into_string().map_err(|path| {
        Advice::new(format!("{} is not UTF-8", path.display()), "rename it to valid UTF-8").into()
    })
}

/// Makes sure that an image exists: a missing one is built if a recipe has its name, a recipe file
/// is always built. Returns the image's name.
pub(crate) async fn ensure(backend: &Backend, named: &str, print: Printer) -> Result<String> {
    let began = Instant::now();
    let lines = match named.ends_with(".toml") {
        true => start_build(backend, named, false, false).await?,
        false => {
            let missing =
                match backend.get::<Image>(&format!("/v1/images/{}", path_segment(named)?)).await {
                    Ok(_) => return Ok(named.to_owned()),
                    Err(error) if has_code(&error, "image_missing") => error,
                    Err(error) => return Err(error),
                };
            let lines = match start_build(backend, named, false, false).await {
                Err(error) if has_code(&error, "recipe_missing") => return Err(missing),
                begun => begun?,
            };
            print.note(format!("Building image {named}; the first build takes minutes"));
            lines
        }
    };
    let image = follow(lines, print).await?;
    let time = human_elapsed(began);
    print.note(format!("Built {} in {time}", image.name));
    Ok(image.name)
}

/// The image of sessions of an agent where none is configured.
pub(crate) async fn default_name(backend: &Backend, agent: &AgentName) -> Result<String> {
    let has_all = match backend.get::<Image>(&format!("/v1/images/{ALL_AGENTS}")).await {
        Ok(_) => true,
        Err(error) if has_code(&error, "image_missing") => false,
        Err(error) => return Err(error),
    };
    Ok(default_image(agent, has_all).to_owned())
}

fn has_code(error: &anyhow::Error, code: &str) -> bool {
    error.downcast_ref::<ApiRefusal>().is_some_and(|refused| refused.0.code == code)
}

pub(crate) async fn pull(
    backend: &Backend,
    reference: String,
    name: Option<String>,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    let from = ImageSource::Pull(reference);
    let order =
        CreateImage { from, name, force: false, host_network: false, max_bytes: Some(max_bytes) };
    follow(make(backend, &order).await?, print).await
}

/// Imports an image from an archive, a folder or standard input.
pub(crate) async fn import(
    backend: &Backend,
    name: String,
    from: &Path,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    if from.as_os_str() == "-" {
        return upload(backend, &name, "standard input", std::io::stdin(), max_bytes, print).await;
    }
    let read = || format!("cannot read {}", from.display());
    if std::fs::metadata(from).with_context(read)?.is_dir() {
        if !backend.shares_filesystem() {
            let hint = format!(
                "`tar -C {} -c . | harvest image import {name} -` uploads it",
                from.display()
            );
            bail!(Advice::new(
                "the server is on another machine and cannot read this folder",
                hint
            ));
        }
        let from = ImageSource::Folder(absolute_path(from)?);
        let order = CreateImage {
            from,
            name: Some(name),
            force: false,
            host_network: false,
            max_bytes: Some(max_bytes),
        };
        return follow(make(backend, &order).await?, print).await;
    }
    let shown = from.display().to_string();
    upload(backend, &name, &shown, File::open(from).with_context(read)?, max_bytes, print).await
}

async fn make(backend: &Backend, order: &CreateImage) -> Result<Lines> {
    backend.lines(Method::POST, "/v1/images", RequestBody::Json(serde_json::to_vec(order)?)).await
}

async fn upload(
    backend: &Backend,
    name: &str,
    source: &str,
    from: impl Read + Send + 'static,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    let query = query(&[("max_bytes", &*max_bytes.to_string()), ("source", source)]);
    let path = format!("/v1/images/{}?{query}", path_segment(name)?);
    let sent = RequestBody::Stream("application/x-tar", read_chunks(from));
    follow(backend.lines(Method::PUT, &path, sent).await?, print).await
}

/// Streams a reader from a separate thread, since reads may block.
fn read_chunks(mut from: impl Read + Send + 'static) -> ByteStream {
    let (sender, mut receiver) = mpsc::channel(2);
    // The stream ends with the error, if there is one.
    std::thread::spawn(move || feed(&mut from, CHUNK_BYTES, &sender));
    stream::poll_fn(move |context| receiver.poll_recv(context)).boxed()
}

async fn follow(mut lines: Lines, print: Printer) -> Result<Image> {
    let mut progress =
        BuildProgress { print, step: String::new(), cached: None, began: Instant::now() };
    let image = loop {
        match lines.json::<ImageLine>().await? {
            Some(ImageLine::Made { image }) => {
                // A build without a step that ran says nothing.
                if !progress.step.is_empty() {
                    progress.note_cached();
                }
                break Ok(image);
            }
            Some(ImageLine::Failed { message, hint: Some(hint), .. }) => {
                break Err(Advice::new(message, hint).into());
            }
            Some(ImageLine::Failed { message, .. }) => break Err(anyhow::anyhow!(message)),
            Some(line) => progress.update(line),
            None => break Err(anyhow::anyhow!("the response ended before the image was ready")),
        }
    };
    print.end_live();
    image
}

/// The progress of a build: permanent lines, and a live line on a terminal.
struct BuildProgress {
    print: Printer,
    step: String,
    /// The first and the last of the cached steps in a row, and the total.
    cached: Option<(usize, usize, usize)>,
    began: Instant,
}

impl BuildProgress {
    fn update(&mut self, line: ImageLine) {
        match line {
            ImageLine::Waiting { image } => {
                self.step = format!("Waiting for another build of {image}");
                self.begin_step();
            }
            ImageLine::StepStarted { index, total, what } => {
                self.note_cached();
                self.step = format!("Running {index}/{total} {what}");
                self.begin_step();
            }
            ImageLine::StepDone { millis, .. } => {
                let step = self.step.trim_start_matches("Running ");
                self.print.end_live();
                self.print.note(format!("  Finished {step} in {}", human_millis(millis)));
            }
            ImageLine::StepCached { index, total, what } if self.print.verbose => {
                self.print.note(format!("  Cached {index}/{total} {what}"));
            }
            ImageLine::StepCached { index, total, .. } => {
                let first = self.cached.map_or(index, |(first, ..)| first);
                self.cached = Some((first, index, total));
            }
            ImageLine::Bytes { done, total } => self.live(&transferred(done, total)),
            ImageLine::Output { line } if self.print.verbose => {
                self.print.note(format!("  | {line}"))
            }
            ImageLine::Output { line } => self.live(&line),
            ImageLine::Made { .. } | ImageLine::Failed { .. } => {}
        }
    }

    /// Says which steps came from the cache, so that the numbers do not jump.
    fn note_cached(&mut self) {
        if let Some(cached) = self.cached.take() {
            self.print.end_live();
            self.print.note(format!("  {}", cached_steps(cached)));
        }
    }

    fn begin_step(&mut self) {
        self.began = Instant::now();
        match self.print.is_live() {
            true => self.live(""),
            false => self.print.note(format!("  {}", self.step)),
        }
    }

    fn live(&self, detail: &str) {
        self.print.live(&format!("{}  {detail}", self.step), Some(self.began.elapsed()));
    }
}

/// `Cached 7–9/10`
fn cached_steps((first, last, total): (usize, usize, usize)) -> String {
    match first == last {
        true => format!("Cached {first}/{total}"),
        false => format!("Cached {first}–{last}/{total}"),
    }
}

/// `12 MB of 40 MB`
fn transferred(done: u64, total: Option<u64>) -> String {
    let megabytes = |bytes: u64| format!("{} MB", bytes / 1_000_000);
    let total = total.filter(|total| *total > 0).map(|total| format!(" of {}", megabytes(total)));
    megabytes(done) + &total.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_steps_in_a_row_are_one_line() {
        assert_eq!(cached_steps((7, 9, 10)), "Cached 7–9/10");
        assert_eq!(cached_steps((1, 1, 10)), "Cached 1/10");
    }

    #[test]
    fn transfer_names_the_total_if_known() {
        assert_eq!(transferred(12_345_678, Some(40_000_000)), "12 MB of 40 MB");
        assert_eq!(transferred(12_345_678, None), "12 MB");
    }
}
