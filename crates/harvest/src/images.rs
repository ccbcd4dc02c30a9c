//! Images: built, pulled and imported by whoever is asked, with what happens meanwhile on the screen.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, stream};
use harvest_proto::api::machines::{Image, ImageLine, ImageOrigin, MakeImage};
use harvest_server::here::{Pieces, Sent};
use reqwest::Method;
use tokio::sync::mpsc;

use crate::{
    client::segment,
    desk::Desk,
    follow::Lines,
    printer::{Advice, Printer, Refused, took},
};

// Cells of a bar.
const BAR: usize = 24;

// What is read of an archive at once.
const PIECE_BYTES: usize = 256 * 1024;

/// Builds the image of a recipe that comes along, or of a file. What has not changed is not made again.
pub(crate) async fn build(desk: &Desk, named: &str, force: bool, print: Printer) -> Result<Image> {
    follow(begin(desk, named, force).await?, print).await
}

async fn begin(desk: &Desk, named: &str, force: bool) -> Result<Lines> {
    let from = match named.ends_with(".toml") {
        true => recipe_file(desk, Path::new(named))?,
        false => ImageOrigin::Recipe(named.to_owned()),
    };
    make(desk, &MakeImage { from, name: None, force, max_bytes: None }).await
}

/// A recipe's file by its path, where that means the same there; else what it says.
fn recipe_file(desk: &Desk, path: &Path) -> Result<ImageOrigin> {
    let read = || format!("cannot read {}", path.display());
    if !desk.shares_our_files() {
        return Ok(ImageOrigin::Text(std::fs::read_to_string(path).with_context(read)?));
    }
    Ok(ImageOrigin::File(whole_path(path)?))
}

fn whole_path(path: &Path) -> Result<String> {
    let whole = path.canonicalize().with_context(|| format!("cannot read {}", path.display()))?;
    whole.into_os_string().into_string().map_err(|path| {
        Advice::new(format!("{} is not UTF-8", path.display()), "give it a name that is text")
            .into()
    })
}

/// Sees to it that there is an image of this name, or of this recipe's file: one that is missing is built,
/// if a recipe has its name. Answers what it is called.
pub(crate) async fn ensure(desk: &Desk, named: &str, print: Printer) -> Result<String> {
    let began = std::time::Instant::now();
    let lines = match named.ends_with(".toml") {
        true => begin(desk, named, false).await?,
        false => {
            let missing = match desk.get::<Image>(&format!("/v1/images/{}", segment(named)?)).await
            {
                Ok(_) => return Ok(named.to_owned()),
                Err(error) if is(&error, "image_missing") => error,
                Err(error) => return Err(error),
            };
            let lines = match begin(desk, named, false).await {
                Err(error) if is(&error, "recipe_missing") => return Err(missing),
                begun => begun?,
            };
            print.note(format!("Building the image {named}, which takes minutes the first time"));
            lines
        }
    };
    let image = follow(lines, print).await?;
    let time = took(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    print.note(format!("Built {} in {time}", image.name));
    Ok(image.name)
}

fn is(error: &anyhow::Error, code: &str) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.0.code == code)
}

/// Pulls an image from a registry.
pub(crate) async fn pull(
    desk: &Desk,
    reference: String,
    name: Option<String>,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    let from = ImageOrigin::Pull(reference);
    let order = MakeImage { from, name, force: false, max_bytes: Some(max_bytes) };
    follow(make(desk, &order).await?, print).await
}

/// Makes an image of an archive, a folder, or what comes on standard input.
pub(crate) async fn import(
    desk: &Desk,
    name: String,
    from: &Path,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    if from.as_os_str() == "-" {
        return send(desk, &name, "standard input", std::io::stdin(), max_bytes, print).await;
    }
    let read = || format!("cannot read {}", from.display());
    if std::fs::metadata(from).with_context(read)?.is_dir() {
        if !desk.shares_our_files() {
            let hint = format!(
                "`tar -C {} -c . | harvest image import {name} -` sends it",
                from.display()
            );
            bail!(Advice::new("a folder of this machine means nothing to the server", hint));
        }
        let from = ImageOrigin::Folder(whole_path(from)?);
        let order = MakeImage { from, name: Some(name), force: false, max_bytes: Some(max_bytes) };
        return follow(make(desk, &order).await?, print).await;
    }
    let shown = from.display().to_string();
    send(desk, &name, &shown, File::open(from).with_context(read)?, max_bytes, print).await
}

async fn make(desk: &Desk, order: &MakeImage) -> Result<Lines> {
    desk.lines(Method::POST, "/v1/images", Sent::Json(serde_json::to_vec(order)?)).await
}

async fn send(
    desk: &Desk,
    name: &str,
    source: &str,
    from: impl Read + Send + 'static,
    max_bytes: u64,
    print: Printer,
) -> Result<Image> {
    let source = percent(source);
    let path = format!("/v1/images/{}?max_bytes={max_bytes}&source={source}", segment(name)?);
    let sent = Sent::Stream("application/x-tar", pieces(from));
    follow(desk.lines(Method::PUT, &path, sent).await?, print).await
}

/// Any text as part of a query.
fn percent(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    let escaped =
        |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escaped).collect()
}

/// What is read, as it is read; in a thread, because who reads may wait.
fn pieces(mut from: impl Read + Send + 'static) -> Pieces {
    let (pieces, waiting) = mpsc::channel(2);
    std::thread::spawn(move || {
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            let read = match from.read(&mut piece) {
                Ok(0) => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(length) => {
                    piece.truncate(length);
                    Ok(piece)
                }
                Err(error) => Err(error),
            };
            let torn = read.is_err();
            if pieces.blocking_send(read).is_err() || torn {
                return;
            }
        }
    });
    stream::unfold(waiting, |mut waiting| async move { Some((waiting.recv().await?, waiting)) })
        .boxed()
}

async fn follow(mut lines: Lines, print: Printer) -> Result<Image> {
    let mut screen = Screen { print, step: String::new(), at: (0, 1) };
    let image = loop {
        match lines.json::<ImageLine>().await? {
            Some(ImageLine::Made { image }) => break Ok(image),
            Some(ImageLine::Failed { message, hint: Some(hint), .. }) => {
                break Err(Advice::new(message, hint).into());
            }
            Some(ImageLine::Failed { message, .. }) => break Err(anyhow::anyhow!(message)),
            Some(line) => screen.tell(line),
            None => break Err(anyhow::anyhow!("the answer ended before the image was made")),
        }
    };
    print.moving("");
    image
}

/// How far a build has come: lines that stay, and on a terminal one that moves.
struct Screen {
    print: Printer,
    step: String,
    at: (usize, usize),
}

impl Screen {
    fn tell(&mut self, line: ImageLine) {
        match line {
            ImageLine::Waiting { image } => {
                self.note(&format!("  Waiting for another build of {image}"))
            }
            ImageLine::StepStarted { index, total, what } => {
                self.step = format!("{index}/{total} {what}");
                self.at = (index, total);
                match self.print.moves() {
                    true => self.bar(self.share(), ""),
                    false => self.note(&format!("  Making {}", self.step)),
                }
            }
            ImageLine::StepDone { millis, .. } => {
                self.note(&format!("  Made {} in {}", self.step, took(millis)))
            }
            ImageLine::StepCached { index, total, what } if self.print.verbose => {
                self.note(&format!("  Found {index}/{total} {what}"));
            }
            ImageLine::Bytes { done, total } => self.bytes(done, total),
            ImageLine::Output { line } if self.print.verbose => self.note(&format!("  | {line}")),
            ImageLine::Output { line } => self.bar(self.share(), &line),
            ImageLine::StepCached { .. } | ImageLine::Made { .. } | ImageLine::Failed { .. } => {}
        }
    }

    fn note(&self, line: &str) {
        self.print.moving("");
        self.print.note(line);
    }

    fn bytes(&self, done: u64, total: Option<u64>) {
        let share =
            total.filter(|total| *total > 0).map_or(0.0, |total| done as f64 / total as f64);
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
    fn any_text_fits_into_a_query() {
        assert_eq!(percent("/a b/ä&x=1.tar"), "/a%20b/%C3%A4%26x%3D1.tar");
    }

    #[test]
    fn a_bar_is_empty_then_full_and_never_longer() {
        assert_eq!(bar(0.0), format!("[{}]", "-".repeat(BAR)));
        assert_eq!(bar(7.0), format!("[{}]", "#".repeat(BAR)));
        assert!([0.1, 0.5, f64::NAN].iter().all(|share| bar(*share).len() == BAR + 2));
    }
}
