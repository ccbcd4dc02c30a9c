//! Images of this machine: made where it may block, with what happens meanwhile as it happens.

use std::{io, path::Path};

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use harvest_engine::{
    BuildOptions, Engine, EngineError, Image as Made, Import, Progress, PullOptions, Recipe,
    UnpackLimits,
};
use harvest_proto::api::machines::{
    Image, ImageConfig, ImageLayer, ImageLine, ImageOrigin, ImageUsage, ImageUsers, MakeImage,
};
use harvest_session::machines::{Archive, ImageLines, Images, ImportImage, MachineError};
use tokio::{sync::mpsc, task::spawn_blocking};

use super::{
    LocalMachines, Recipes,
    errors::{explained, image_missing, missing, words},
};

// A slow reader misses some of what moves, not the end.
const LINES_IN_FLIGHT: usize = 256;

// Pieces of an archive that wait to be unpacked.
const PIECES_IN_FLIGHT: usize = 8;

#[async_trait]
impl Images for LocalMachines {
    async fn image_list(&self) -> Result<Vec<Image>, MachineError> {
        let images = self.ask("cannot list images", Engine::images).await?;
        Ok(images.into_iter().map(image).collect())
    }

    async fn image_get(&self, named: &str) -> Result<Image, MachineError> {
        let named = named.to_owned();
        self.work("cannot look for the image", move |engine| find(engine, &named)).await.map(image)
    }

    async fn image_usage(&self, named: &str) -> Result<ImageUsage, MachineError> {
        let named = named.to_owned();
        self.work("cannot measure the image", move |engine| {
            let image = find(engine, &named)?;
            let said = |doing: &str| {
                let doing = doing.to_owned();
                move |error| explained(doing, error)
            };
            let layers = engine.image_layers(&image).map_err(said("cannot look at its layers"))?;
            let users = engine.image_users(&image).map_err(said("cannot find who uses it"))?;
            let layers =
                layers.into_iter().map(|(id, bytes)| ImageLayer { id: id.into(), bytes }).collect();
            let used_by = ImageUsers {
                images: users.images,
                sandboxes: users.sandboxes,
                snapshots: users.snapshots,
            };
            Ok(ImageUsage { layers, used_by })
        })
        .await
    }

    async fn image_make(&self, order: MakeImage) -> Result<ImageLines, MachineError> {
        let limits = limits(order.max_bytes);
        match order.from {
            ImageOrigin::Pull(reference) => {
                let options = PullOptions { limits, ..PullOptions::default() };
                let name = order.name;
                Ok(self.make(format!("cannot pull {reference}"), move |engine, tell| {
                    engine.image_pull(&reference, name.as_deref(), &options, tell)
                }))
            }
            ImageOrigin::Folder(folder) => {
                let what = "an image made of a folder needs a `name`";
                let name =
                    order.name.ok_or_else(|| MachineError::invalid("invalid_image", what))?;
                Ok(self.make(format!("cannot make the image `{name}`"), move |engine, tell| {
                    engine.image_import(&name, Import::Folder(Path::new(&folder)), limits, tell)
                }))
            }
            recipe => {
                let recipes = self.recipes.clone();
                let recipe =
                    self.work("cannot read the recipe", move |_| read(&recipes, recipe)).await?;
                let options = BuildOptions { force: order.force };
                Ok(self.make(
                    format!("cannot build the image `{}`", recipe.name),
                    move |engine, tell| engine.image_build(&recipe, options, tell),
                ))
            }
        }
    }

    async fn image_import(
        &self,
        order: ImportImage,
        mut archive: Archive,
    ) -> Result<ImageLines, MachineError> {
        let (pieces, waiting) = mpsc::channel(PIECES_IN_FLIGHT);
        tokio::spawn(async move {
            while let Some(piece) = archive.next().await {
                let torn = piece.is_err();
                if pieces.send(piece).await.is_err() || torn {
                    return;
                }
            }
        });
        let (name, limits) = (order.name, limits(order.max_bytes));
        let source = order.source.unwrap_or_else(|| "that was sent".to_owned());
        Ok(self.make(format!("cannot make the image `{name}`"), move |engine, tell| {
            let mut bytes = Pieces { waiting, rest: Vec::new(), at: 0 };
            let archive = Import::Archive { name: &source, bytes: &mut bytes, length: None };
            engine.image_import(&name, archive, limits, tell)
        }))
    }

    async fn image_delete(&self, named: &str) -> Result<(), MachineError> {
        let (named, doing) = (named.to_owned(), format!("cannot remove the image `{named}`"));
        self.work(doing.clone(), move |engine| {
            let image = find(engine, &named)?;
            engine.image_remove(&image.name).map_err(|error| explained(doing, error))
        })
        .await
    }
}

impl LocalMachines {
    /// Makes an image in a thread of its own, which finishes whoever listens.
    fn make(
        &self,
        doing: String,
        work: impl FnOnce(&Engine, &mut dyn FnMut(Progress)) -> Result<Made, EngineError>
        + Send
        + 'static,
    ) -> ImageLines {
        let engine = self.engine.clone();
        let (tell, told) = mpsc::channel(LINES_IN_FLIGHT);
        let done = spawn_blocking(move || {
            // What nobody reads in time is passed over rather than waited for.
            work(&engine, &mut |progress| drop(tell.try_send(line(progress))))
        });
        let meanwhile =
            stream::unfold(told, |mut told| async move { Some((told.recv().await?, told)) });
        let end = stream::once(async move {
            let made = done.await.map_err(|broke| {
                let doing = doing.clone();
                MachineError::Failed { doing, hint: None, source: broke.into() }
            });
            match made.and_then(|made| made.map_err(|error| explained(doing, error))) {
                Ok(made) => ImageLine::Made { image: image(made) },
                Err(error) => ImageLine::Failed {
                    code: error.code().to_owned(),
                    message: words(&error),
                    hint: error.hint().map(str::to_owned),
                },
            }
        });
        meanwhile.chain(end).boxed()
    }
}

/// An archive that comes in pieces, read where it may block.
struct Pieces {
    waiting: mpsc::Receiver<io::Result<Vec<u8>>>,
    rest: Vec<u8>,
    at: usize,
}

impl io::Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.rest.len() {
            match self.waiting.blocking_recv() {
                Some(piece) => (self.rest, self.at) = (piece?, 0),
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.rest.len() - self.at);
        buffer[..count].copy_from_slice(&self.rest[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// By name or id.
fn find(engine: &Engine, named: &str) -> Result<Made, MachineError> {
    let said = |error| explained("cannot look for the image".to_owned(), error);
    if let Some(image) = engine.image(named).map_err(said)? {
        return Ok(image);
    }
    let mut images = engine.images().map_err(said)?.into_iter();
    images.find(|image| image.id.to_string() == named).ok_or_else(|| image_missing(named))
}

fn read(recipes: &Recipes, from: ImageOrigin) -> Result<Recipe, MachineError> {
    let placed = || {
        (recipes.place)().map_err(|source| MachineError::Failed {
            doing: "cannot write the recipes that come along".to_owned(),
            hint: None,
            source: source.into(),
        })
    };
    let read = match from {
        ImageOrigin::Recipe(name) => {
            if !recipes.names.contains(&name) {
                let hint = format!(
                    "there are {}; or name a file that ends in .toml",
                    recipes.names.join(", ")
                );
                return Err(missing(
                    "recipe_missing",
                    format!("there is no recipe `{name}`"),
                    hint,
                ));
            }
            Recipe::read(&placed()?.join(format!("{name}.toml")))
        }
        ImageOrigin::File(path) => Recipe::read(Path::new(&path)),
        // Those it may start from are beside it; other files are not.
        ImageOrigin::Text(text) => Recipe::parse(&text, &placed()?),
        ImageOrigin::Pull(_) | ImageOrigin::Folder(_) => {
            return Err(MachineError::invalid("invalid_image", "this is no recipe"));
        }
    };
    read.map_err(|error| MachineError::Invalid {
        code: "invalid_recipe",
        what: format!("cannot use the recipe: {}", words(&error)),
        hint: None,
    })
}

fn limits(max_bytes: Option<u64>) -> UnpackLimits {
    let default = UnpackLimits::default();
    UnpackLimits { bytes: max_bytes.unwrap_or(default.bytes), ..default }
}

fn image(made: Made) -> Image {
    Image {
        id: made.id,
        name: made.name,
        layers: made.layers.into_iter().map(String::from).collect(),
        config: config(made.config),
        recipe_key: made.recipe_key,
        bytes: made.bytes,
        created_at: made.created_at,
        source: made.source,
    }
}

/// What commands get, in the words of the API.
pub(super) fn config(config: harvest_engine::ImageConfig) -> ImageConfig {
    ImageConfig { env: config.env, user: config.user, workdir: config.workdir }
}

fn line(progress: Progress) -> ImageLine {
    match progress {
        Progress::Waiting { image } => ImageLine::Waiting { image },
        Progress::StepStarted { index, total, what } => {
            ImageLine::StepStarted { index, total, what }
        }
        Progress::StepCached { index, total, what } => ImageLine::StepCached { index, total, what },
        Progress::Bytes { done, total } => ImageLine::Bytes { done, total },
        Progress::Output { line } => ImageLine::Output { line },
        Progress::StepDone { index, millis } => ImageLine::StepDone { index, millis },
    }
}
