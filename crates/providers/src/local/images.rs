//! Images on this machine: built on blocking threads, with streamed progress.

use std::{any::Any, borrow::Cow, io, path::Path, sync::Arc};

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use harvest_engine::{Engine, Image as EngineImage};
use harvest_images::{
    BuildOptions, ImageError, Import, PullOptions, Recipe, StepDoors, UnpackLimits,
};
use harvest_proto::{
    EventBody, Hint, NetworkPolicy,
    api::{
        CreateImage, Image, ImageConfig, ImageLayer, ImageLine, ImageSource, ImageUsage,
        ImageUsers, SandboxDoor,
    },
};
use harvest_session::{
    DoorSocket, error_chain,
    sandboxes::{
        Archive, ImageLines, Images, ImportImage, MissingObject, SandboxError, StandaloneDoors,
    },
};
use tokio::{runtime::Handle, sync::mpsc, task::spawn_blocking};

use super::{
    Local, Recipes,
    errors::{image_error, sandbox_error},
};

// A slow reader loses progress lines, never the last one.
const LINES_IN_FLIGHT: usize = 256;

// Chunks of an upload that wait to be unpacked.
const CHUNKS_IN_FLIGHT: usize = 8;

#[async_trait]
impl Images for Local {
    async fn image_list(&self) -> Result<Vec<Image>, SandboxError> {
        let images = self.engine("cannot list images", Engine::images).await?;
        Ok(images.into_iter().map(api_image).collect())
    }

    async fn image_get(&self, named: &str) -> Result<Image, SandboxError> {
        let named = named.to_owned();
        self.work("cannot find the image", move |engine| find(engine, &named)).await.map(api_image)
    }

    async fn image_usage(&self, named: &str) -> Result<ImageUsage, SandboxError> {
        let named = named.to_owned();
        self.work("cannot measure the image", move |engine| {
            let image = find(engine, &named)?;
            let failed = |doing| move |error| sandbox_error(doing, error);
            let layers =
                engine.image_layers(&image).map_err(failed("cannot measure its layers"))?;
            let users = engine.image_users(&image).map_err(failed("cannot find its users"))?;
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

    async fn image_make(&self, order: CreateImage) -> Result<ImageLines, SandboxError> {
        let limits = limits(order.max_bytes);
        match order.from {
            ImageSource::Pull(reference) => {
                let options = PullOptions { limits, ..PullOptions::default() };
                let name = order.name;
                Ok(self.make(format!("cannot pull {reference}"), move |engine, report| {
                    harvest_images::pull(engine, &reference, name.as_deref(), &options, report)
                }))
            }
            ImageSource::Folder(folder) => {
                let what = "an image created from a folder needs a `name`";
                let name =
                    order.name.ok_or_else(|| SandboxError::invalid("invalid_image", what))?;
                Ok(self.make(format!("cannot create image `{name}`"), move |engine, report| {
                    harvest_images::import(
                        engine,
                        &name,
                        Import::Folder(Path::new(&folder)),
                        limits,
                        report,
                    )
                }))
            }
            recipe => {
                let built_in = matches!(recipe, ImageSource::Recipe(_));
                let recipes = self.recipes.clone();
                let recipe =
                    self.work("cannot read the recipe", move |_| read(&recipes, recipe)).await?;
                let doors = self.opener.get().map(|opener| GatewayDoors {
                    opener: Arc::clone(opener),
                    runtime: Handle::current(),
                });
                let CreateImage { force, host_network, .. } = order;
                Ok(self.make(
                    format!("cannot build image `{}`", recipe.name),
                    move |engine, report| {
                        let doors = doors.as_ref().map(|doors| doors as &dyn StepDoors);
                        let options = BuildOptions { force, host_network, built_in, doors };
                        harvest_images::build(engine, &recipe, options, report)
                    },
                ))
            }
        }
    }

    async fn image_import(
        &self,
        order: ImportImage,
        mut archive: Archive,
    ) -> Result<ImageLines, SandboxError> {
        let (pieces, waiting) = mpsc::channel(CHUNKS_IN_FLIGHT);
        tokio::spawn(async move {
            while let Some(piece) = archive.next().await {
                let torn = piece.is_err();
                if pieces.send(piece).await.is_err() || torn {
                    return;
                }
            }
        });
        let (name, limits) = (order.name, limits(order.max_bytes));
        let source = order.source.unwrap_or_else(|| "upload".to_owned());
        Ok(self.make(format!("cannot create image `{name}`"), move |engine, report| {
            let mut bytes = ChunkReader { waiting, chunk: io::Cursor::default() };
            let archive = Import::Archive { name: &source, bytes: &mut bytes, length: None };
            harvest_images::import(engine, &name, archive, limits, report)
        }))
    }

    async fn image_delete(&self, named: &str) -> Result<(), SandboxError> {
        let (named, doing) = (named.to_owned(), format!("cannot remove image `{named}`"));
        self.work(doing.clone(), move |engine| {
            let image = find(engine, &named)?;
            engine.image_remove(&image.name).map_err(|error| sandbox_error(doing, error))
        })
        .await
    }
}

impl Local {
    /// Creates an image on a blocking thread, which finishes even when the stream is dropped.
    fn make(
        &self,
        doing: String,
        work: impl FnOnce(&Engine, &mut dyn FnMut(ImageLine)) -> Result<EngineImage, ImageError>
        + Send
        + 'static,
    ) -> ImageLines {
        let engine = self.engine.clone();
        let (report, lines) = mpsc::channel(LINES_IN_FLIGHT);
        let done = spawn_blocking(move || {
            // Lines are dropped when the reader is slow, so that the build never waits.
            work(&engine, &mut |line| drop(report.try_send(line)))
        });
        let meanwhile =
            stream::unfold(lines, |mut lines| async move { Some((lines.recv().await?, lines)) });
        let end = stream::once(async move {
            let result =
                done.await.map_err(|panicked| SandboxError::failed(doing.clone(), panicked));
            match result.and_then(|result| result.map_err(|error| image_error(doing, error))) {
                Ok(image) => ImageLine::Made { image: api_image(image) },
                Err(error) => ImageLine::Failed {
                    code: error.code().to_owned(),
                    message: error_chain(&error),
                    hint: error.hint().map(Cow::into_owned),
                },
            }
        });
        meanwhile.chain(end).boxed()
    }
}

/// The doors of build steps, which are those of standalone sandboxes.
struct GatewayDoors {
    opener: Arc<dyn StandaloneDoors>,
    runtime: Handle,
}

impl StepDoors for GatewayDoors {
    fn open(
        &self,
        socket: &Path,
        allow: &[String],
        refused: Box<dyn Fn(String) + Send + Sync>,
    ) -> Result<Box<dyn Any>, String> {
        let listener = DoorSocket::bind(socket).map_err(|error| error.to_string())?;
        let door = SandboxDoor { policy: NetworkPolicy::Trusted, allow: allow.to_vec() };
        let observer = Box::new(move |event| {
            if let EventBody::EgressRefused { name, reason, .. } = event {
                refused(format!("refused a connection to {name}: {reason}"));
            }
        });
        let opened = self.opener.open(Box::new(listener), &door, observer);
        let guard = self.runtime.block_on(opened).map_err(|error| error_chain(&error))?;
        Ok(guard)
    }
}

/// A blocking reader over a streamed archive.
struct ChunkReader {
    waiting: mpsc::Receiver<io::Result<Vec<u8>>>,
    chunk: io::Cursor<Vec<u8>>,
}

impl io::Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.chunk.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            match self.waiting.blocking_recv() {
                Some(chunk) => self.chunk = io::Cursor::new(chunk?),
                None => return Ok(0),
            }
        }
    }
}

/// Finds an image by name or id.
fn find(engine: &Engine, named: &str) -> Result<EngineImage, SandboxError> {
    let failed = |error| sandbox_error("cannot find the image", error);
    if let Some(image) = engine.image(named).map_err(failed)? {
        return Ok(image);
    }
    let mut images = engine.images().map_err(failed)?.into_iter();
    images
        .find(|image| image.id.to_string() == named)
        .ok_or_else(|| SandboxError::Missing(MissingObject::Image(named.to_owned())))
}

fn read(recipes: &Recipes, from: ImageSource) -> Result<Recipe, SandboxError> {
    let placed = || {
        (recipes.write_all)()
            .map_err(|error| SandboxError::failed("cannot write the built-in recipes", error))
    };
    let read = match from {
        ImageSource::Recipe(name) => {
            if !recipes.names.contains(&name) {
                let known = recipes.names.clone();
                return Err(SandboxError::Missing(MissingObject::Recipe { name, known }));
            }
            Recipe::read(&placed()?.join(format!("{name}.toml")))
        }
        ImageSource::File(path) => Recipe::read(Path::new(&path)),
        // The text may refer to built-in recipes, but not to other files.
        ImageSource::Text(text) => Recipe::parse(&text, &placed()?),
        ImageSource::Pull(_) | ImageSource::Folder(_) => {
            return Err(SandboxError::invalid("invalid_image", "not a recipe"));
        }
    };
    read.map_err(|error| {
        let what = format!("invalid recipe: {}", error_chain(&error));
        SandboxError::invalid("invalid_recipe", what)
    })
}

fn limits(max_bytes: Option<u64>) -> UnpackLimits {
    let default = UnpackLimits::default();
    UnpackLimits { bytes: max_bytes.unwrap_or(default.bytes), ..default }
}

fn api_image(image: EngineImage) -> Image {
    Image {
        id: image.id,
        name: image.name,
        layers: image.layers.into_iter().map(String::from).collect(),
        config: config(image.config),
        recipe_key: image.recipe_key,
        bytes: image.bytes,
        created_at: image.created_at,
        source: image.source,
    }
}

pub(super) fn config(config: harvest_engine::ImageConfig) -> ImageConfig {
    let harvest_engine::ImageConfig { env, user, workdir, agents } = config;
    ImageConfig { env, user, workdir, agents }
}
