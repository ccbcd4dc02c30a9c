//! Builds images from recipes. A step whose layer is in the cache is skipped; any other step runs
//! in a sandbox whose writable layer becomes the step's layer. A failed build leaves the image of
//! that name unchanged.

pub(crate) mod bootstrap;
pub(crate) mod copy;
pub(crate) mod host_config;
mod secrets;
mod step;

use std::{
    any::Any,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use harvest_engine::{
    Engine, EngineError, Image, ImageConfig, LayerCache, LayerId, Limits, Network, Origin, Owner,
    PulledImage, Running, Spec, random_name, supervisor_client::SupervisorClient,
};
use harvest_proto::{
    SandboxId,
    api::{BUILT_IN_RECIPE, ImageLine},
    bridge::Exit,
    launch::NetworkSettings,
};

use crate::{
    ImageError,
    import::{self, write_image},
    layer_key::{content_key, key, layer_of_key},
    oci::{self, PullOptions},
    recipe::{Base, Recipe, RecipeStep},
    stream::elapsed_millis,
};
use host_config::HostConfig;
pub(crate) use step::Tail;
use step::{LineSplitter, describe_base, describe_step, remove_mount_points, step_command};

// A longer chain of images that start from each other is a cycle.
const MAX_PARENTS: usize = 8;

/// Options of [`build`].
#[derive(Clone, Copy, Default)]
pub struct BuildOptions<'a> {
    /// Run every step again, even those whose layer is in the cache.
    pub force: bool,
    /// Every step uses the host's network, whatever the recipe says.
    pub host_network: bool,
    /// The recipe is part of Harvest, which keeps its image fresh.
    pub built_in: bool,
    /// The doors of steps, which have no network without them.
    pub doors: Option<&'a dyn StepDoors>,
}

/// Opens the doors of steps.
pub trait StepDoors {
    /// Serves a door at this socket until the guard is dropped: package registries and these names.
    /// Calls `refused` with a sentence for each other one.
    ///
    /// # Errors
    /// When the socket cannot be created or a name is invalid.
    fn open(
        &self,
        socket: &Path,
        allow: &[String],
        refused: Box<dyn Fn(String) + Send + Sync>,
    ) -> Result<Box<dyn Any>, String>;
}

/// Builds the image a recipe describes. An image it starts from is built first when its recipe is
/// in the same folder. Of two concurrent builds of one image the second waits and then finds the
/// first one's layers in the cache.
///
/// # Errors
/// When a step fails, or no sandbox starts from the result; an image of that name stays unchanged.
pub fn build(
    engine: &Engine,
    recipe: &Recipe,
    options: BuildOptions<'_>,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<Image, ImageError> {
    let cache = engine.layer_cache()?;
    Build { cache: &cache, options, progress }.image(recipe, 0)
}

struct Build<'a> {
    cache: &'a LayerCache<'a>,
    options: BuildOptions<'a>,
    progress: &'a mut dyn FnMut(ImageLine),
}

/// What the steps of a recipe reach.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum StepNetwork {
    #[default]
    Nothing,
    Host,
    /// Package registries and these names.
    Door(Vec<String>),
}

/// Sentences about refused connections of a step.
type Refusals = Arc<Mutex<Vec<String>>>;

/// The image as far as it has been built.
#[derive(Default)]
struct BuildState {
    /// The layers so far, bottom first.
    layers: Vec<LayerId>,
    config: ImageConfig,
    /// The new layers of a forced build, by step key. Recorded when the build succeeds.
    forced: BTreeMap<String, LayerId>,
    /// The Debian suite at the bottom, if there is one.
    suite: Option<String>,
    network: StepNetwork,
}

impl Build<'_> {
    fn image(&mut self, recipe: &Recipe, depth: usize) -> Result<Image, ImageError> {
        if depth == MAX_PARENTS {
            let reason = format!("image `{}` starts from itself through other images", recipe.name);
            return Err(ImageError::Invalid { reason });
        }
        let parent = self.parent(recipe, depth)?;
        let _lock = import::lock_image(self.cache, &recipe.name, self.progress)?;
        let pulled = self.pull_base(recipe)?;
        let keys = self.keys(recipe, parent.as_ref(), pulled.as_ref())?;
        let total = keys.len();
        let recipe_key = keys.last().expect("every recipe has a base").clone();
        if let Some(image) = self.unchanged(&recipe.name, &recipe_key)? {
            self.report_all_cached(recipe, total);
            return self.take_over(recipe, image);
        }
        let network = match (recipe.host_network || self.options.host_network, self.options.doors) {
            (true, _) => StepNetwork::Host,
            (false, Some(_)) => StepNetwork::Door(recipe.allow.clone()),
            (false, None) => StepNetwork::Nothing,
        };
        let mut state =
            BuildState { suite: debian_suite(recipe), network, ..BuildState::default() };
        match (parent, pulled) {
            (Some(parent), _) => {
                (state.layers, state.config) = (parent.layers, parent.config);
                let what = describe_base(&recipe.from);
                (self.progress)(ImageLine::StepCached { index: 1, total, what });
            }
            (None, Some(pulled)) => (state.layers, state.config) = (pulled.layers, pulled.config),
            (None, None) => self.base(recipe, &keys[0], total, &mut state)?,
        }
        for (at, step) in recipe.steps.iter().enumerate() {
            self.step(recipe, step, (at + 2, total), &keys[at + 1], &mut state)?;
        }
        self.publish(recipe, recipe_key, state)
    }

    fn parent(&mut self, recipe: &Recipe, depth: usize) -> Result<Option<Image>, ImageError> {
        let Base::Image(name) = &recipe.from else { return Ok(None) };
        let sibling = recipe.folder.join(format!("{name}.toml"));
        if *name != recipe.name && sibling.is_file() {
            return self.image(&Recipe::read(&sibling)?, depth + 1).map(Some);
        }
        match self.cache.image(name)? {
            Some(image) if *name != recipe.name => Ok(Some(image)),
            _ => Err(image_missing(name)),
        }
    }

    // The cache keys of the base and of each step. The parent's layers are part of the key besides
    // its recipe: a forced rebuild of the parent changes them.
    fn keys(
        &self,
        recipe: &Recipe,
        parent: Option<&Image>,
        pulled: Option<&PulledImage>,
    ) -> Result<Vec<String>, ImageError> {
        let mut keys = vec![match (&recipe.from, parent) {
            (Base::Folder(folder), _) => import::folder_key(&resolve(recipe, folder)?)?,
            (Base::Tar(file), _) => import::archive_key(&resolve(recipe, file)?)?,
            (_, Some(parent)) => key(&parent.recipe_key, &parent.layers, ""),
            (base, None) => key("", base, pulled.map_or("", |pulled| &pulled.digest)),
        }];
        for step in &recipe.steps {
            let content = match step {
                RecipeStep::Copy { from, .. } => content_key(&resolve_inside(recipe, from)?)?,
                _ => String::new(),
            };
            keys.push(key(&keys[keys.len() - 1], step, &content));
        }
        Ok(keys)
    }

    fn unchanged(&self, name: &str, recipe_key: &str) -> Result<Option<Image>, ImageError> {
        let image = self
            .cache
            .image(name)?
            .filter(|image| !self.options.force && image.recipe_key == recipe_key);
        Ok(image.filter(|image| image.layers.iter().all(|layer| self.cache.has_layer(layer))))
    }

    /// Records that an up-to-date image is of a built-in recipe, from which it is kept fresh. A
    /// copy of that recipe may have built it.
    fn take_over(&self, recipe: &Recipe, image: Image) -> Result<Image, ImageError> {
        let source = self.source(recipe);
        if !self.options.built_in || image.source == source {
            return Ok(image);
        }
        let image = Image { source, ..image };
        self.cache.write_image(&image)?;
        Ok(image)
    }

    fn source(&self, recipe: &Recipe) -> String {
        let kind = if self.options.built_in { BUILT_IN_RECIPE } else { "recipe" };
        format!("{kind}, {}", describe_base(&recipe.from))
    }

    fn report_all_cached(&mut self, recipe: &Recipe, total: usize) {
        let steps = recipe.steps.iter().map(describe_step);
        for (at, what) in [describe_base(&recipe.from)].into_iter().chain(steps).enumerate() {
            (self.progress)(ImageLine::StepCached { index: at + 1, total, what });
        }
    }

    fn base(
        &mut self,
        recipe: &Recipe,
        key: &str,
        total: usize,
        state: &mut BuildState,
    ) -> Result<(), ImageError> {
        let what = describe_base(&recipe.from);
        self.layer((1, total), &what, key, state, |build, target, _| match &recipe.from {
            Base::Debian { suite, include } => {
                bootstrap::debian(suite, include, target, &mut |line| {
                    (build.progress)(ImageLine::Output { line: line.to_owned() });
                })
            }
            Base::Folder(folder) => import::copy_root(&resolve(recipe, folder)?, target),
            Base::Tar(file) => {
                let file = resolve(recipe, file)?;
                import::unpack_file(&file, key, target, build.cache, build.progress)
            }
            Base::Image(name) | Base::Oci(name) => Err(image_missing(name)),
        })
    }

    // A reference is resolved once and its result recorded, so that an unchanged recipe needs no
    // registry. Only `force` resolves it again.
    fn pull_base(&mut self, recipe: &Recipe) -> Result<Option<PulledImage>, ImageError> {
        let Base::Oci(text) = &recipe.from else { return Ok(None) };
        let reference = import::parse_reference(text)?;
        let base_key = key("", &recipe.from, "");
        let recorded = self.cache.pulled_image(&base_key)?;
        let complete = |image: &PulledImage| image.layers.iter().all(|l| self.cache.has_layer(l));
        let (index, total, what) = (1, recipe.steps.len() + 1, describe_base(&recipe.from));
        if let Some(image) = recorded.filter(|image| !self.options.force && complete(image)) {
            (self.progress)(ImageLine::StepCached { index, total, what });
            return Ok(Some(image));
        }
        self.cache.check_space()?;
        (self.progress)(ImageLine::StepStarted { index, total, what });
        let started = Instant::now();
        let progress = &mut self.progress;
        // The image's layers are parts of this one step.
        let mut report = |inner| match inner {
            ImageLine::StepStarted { index, total, what } => {
                progress(ImageLine::Output { line: format!("fetching {index}/{total} {what}") });
            }
            bytes @ ImageLine::Bytes { .. } => progress(bytes),
            _ => {}
        };
        let pulled = oci::pull(self.cache, &reference, &PullOptions::default(), &mut report)?;
        self.cache.set_pulled_image(&base_key, &pulled)?;
        (self.progress)(ImageLine::StepDone { index, millis: elapsed_millis(started) });
        Ok(Some(pulled))
    }

    fn step(
        &mut self,
        recipe: &Recipe,
        step: &RecipeStep,
        position: (usize, usize),
        key: &str,
        state: &mut BuildState,
    ) -> Result<(), ImageError> {
        match step {
            RecipeStep::Env(env) => state.config.env.extend(env.clone()),
            RecipeStep::User(user) => state.config.user.clone_from(user),
            RecipeStep::Workdir(workdir) => state.config.workdir.clone_from(workdir),
            _ => {
                let make = |build: &mut Self, target: &Path, state: &BuildState| match step {
                    RecipeStep::Copy { from, to } => {
                        let source = resolve_inside(recipe, from)?;
                        copy::copy_into(target, &build.layer_paths(state)?, &source, to)
                    }
                    _ => build.run(step, target, state),
                };
                self.layer(position, &describe_step(step), key, state, make)?;
            }
        }
        Ok(())
    }

    /// Adds the layer of `key` to the state. Unless the layer is in the cache, `make` fills an
    /// empty folder that becomes it.
    fn layer(
        &mut self,
        (index, total): (usize, usize),
        what: &str,
        key: &str,
        state: &mut BuildState,
        make: impl FnOnce(&mut Self, &Path, &BuildState) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        if !self.options.force
            && let Some(layer) = self.cached_layer(key)?
        {
            (self.progress)(ImageLine::StepCached { index, total, what: what.to_owned() });
            state.layers.push(layer);
            return Ok(());
        }
        self.cache.check_space()?;
        (self.progress)(ImageLine::StepStarted { index, total, what: what.to_owned() });
        let started = Instant::now();
        let target = self.cache.create_folder()?;
        let made = make(self, &target, state).and_then(|()| self.commit(&target, key, state));
        match made {
            Ok(layer) => state.layers.push(layer),
            Err(error) => {
                self.cache.discard(&target);
                return Err(error);
            }
        }
        (self.progress)(ImageLine::StepDone { index, millis: elapsed_millis(started) });
        Ok(())
    }

    fn cached_layer(&self, key: &str) -> Result<Option<LayerId>, ImageError> {
        let layer = self.cache.step_layer(key)?.unwrap_or_else(|| layer_of_key(key));
        Ok(self.cache.has_layer(&layer).then_some(layer))
    }

    fn commit(
        &mut self,
        target: &Path,
        key: &str,
        state: &mut BuildState,
    ) -> Result<LayerId, ImageError> {
        let layer = if self.options.force {
            // The layer of the key stays for images that use it.
            let fresh = layer_of_key(&random_name());
            state.forced.insert(key.to_owned(), fresh.clone());
            fresh
        } else {
            layer_of_key(key)
        };
        self.cache.commit(target, &layer)?;
        Ok(layer)
    }

    /// The root folders of the layers so far, top first.
    fn layer_paths(&self, state: &BuildState) -> Result<Vec<PathBuf>, ImageError> {
        let layers = state.layers.iter().rev();
        Ok(layers.map(|layer| self.cache.layer_path(layer)).collect::<Result<_, _>>()?)
    }

    fn run(
        &mut self,
        step: &RecipeStep,
        target: &Path,
        state: &BuildState,
    ) -> Result<(), ImageError> {
        let on_host = state.network == StepNetwork::Host;
        let folder = self.cache.create_folder()?;
        let host = HostConfig::write(folder, state.suite.as_deref(), on_host)?;
        let sources = Path::new(bootstrap::SOURCES);
        let has_sources = copy::open_file(&self.layer_paths(state)?, sources).is_some();
        let from = Origin::Layers { layers: state.layers.clone(), config: state.config.clone() };
        let network = match state.network {
            StepNetwork::Nothing => Network::Nothing,
            StepNetwork::Host => Network::Host,
            StepNetwork::Door(_) => Network::Door,
        };
        let spec = Spec {
            binds: host.binds(has_sources),
            env: host.env.clone(),
            ..sandbox_spec(from, network)
        };
        let running = self.cache.engine().start(&spec)?;
        let (refusals, _door) = self.open_door(&running, &state.network)?;
        let made = self.command(&running.bridge, step, &state.config, &host, &refusals);
        let made = made.and_then(|()| {
            self.cache.take_changes(&spec.id, target)?;
            remove_mount_points(target)
        });
        let removed = self.cache.engine().remove(&spec.id);
        made.and(removed.map_err(Into::into))
    }

    fn command(
        &mut self,
        bridge: &Path,
        step: &RecipeStep,
        config: &ImageConfig,
        host: &HostConfig,
        refusals: &Mutex<Vec<String>>,
    ) -> Result<(), ImageError> {
        let what = describe_step(step);
        let broken = |source| ImageError::Bridge { doing: format!("run `{what}`"), source };
        let mut client = SupervisorClient::dial(bridge).map_err(broken)?;
        let (mut tail, mut lines) = (Tail::default(), LineSplitter::default());
        let progress = &mut self.progress;
        let mut report = |line: &str| {
            let line = host.redactor.redact(line);
            tail.push(&line);
            progress(ImageLine::Output { line });
        };
        let command = step_command(step, config, &host.env);
        let exit = client
            .exec(command, b"", &mut |_, bytes| lines.push(bytes, &mut report))
            .map_err(broken)?;
        lines.finish(&mut report);
        let ending = match exit {
            Exit::Code(0) => return Ok(()),
            Exit::Code(code) => format!("it exited with code {code}"),
            Exit::Signal(signal) => format!("it was killed by signal {signal}"),
            Exit::Oom => "it ran out of memory".to_owned(),
            Exit::Timeout => "it took longer than 30 minutes".to_owned(),
            Exit::Killed => "it was killed".to_owned(),
        };
        tail.push(&ending);
        let refused = std::mem::take(&mut *refusals.lock().unwrap_or_else(PoisonError::into_inner));
        refused.iter().for_each(|line| tail.push(line));
        let hint = match refused.is_empty() {
            true => "the lines above are the last of its output",
            false => {
                "add the names to the recipe: `allow = [\"NAME\"]`, before the steps; or build \
                 with `--net host`"
            }
        };
        Err(ImageError::Step { what, tail: tail.lines(), hint })
    }

    /// Opens the door of a step, and removes its sandbox if that fails.
    fn open_door(
        &mut self,
        running: &Running,
        network: &StepNetwork,
    ) -> Result<(Refusals, Option<Box<dyn Any>>), ImageError> {
        let refusals = Refusals::default();
        let (StepNetwork::Door(allow), Some(doors)) = (network, self.options.doors) else {
            return Ok((refusals, None));
        };
        let lines = Arc::clone(&refusals);
        let refused = Box::new(move |line| {
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        });
        match doors.open(&running.door, allow, refused) {
            Ok(door) => Ok((refusals, Some(door))),
            Err(reason) => {
                self.cache.engine().remove(&running.id)?;
                Err(ImageError::Invalid { reason })
            }
        }
    }

    /// Starts a sandbox from the layers.
    fn prove(&self, state: &BuildState) -> Result<(), ImageError> {
        let from = Origin::Layers { layers: state.layers.clone(), config: state.config.clone() };
        let spec = sandbox_spec(from, Network::Nothing);
        let started = self.cache.engine().start(&spec).map(drop);
        let removed = self.cache.engine().remove(&spec.id);
        started.and(removed).map_err(Into::into)
    }

    fn publish(
        &mut self,
        recipe: &Recipe,
        recipe_key: String,
        state: BuildState,
    ) -> Result<Image, ImageError> {
        self.prove(&state)?;
        for (key, layer) in &state.forced {
            self.cache.set_step_layer(key, layer)?;
        }
        let source = self.source(recipe);
        write_image(self.cache, &recipe.name, state.layers, state.config, recipe_key, source)
    }
}

/// A sandbox of a build.
fn sandbox_spec(from: Origin, network: Network) -> Spec {
    Spec {
        id: SandboxId::random(),
        from,
        // A recipe is trusted with the host's disk space.
        limits: Limits { writable_bytes: None, ..Limits::default() },
        network,
        owner: Owner::Process(std::process::id()),
        binds: Vec::new(),
        volumes: Vec::new(),
        env: BTreeMap::new(),
        door: None,
        settings: NetworkSettings::default(),
        made_by: None,
    }
}

fn image_missing(name: &str) -> ImageError {
    EngineError::ImageMissing { image: name.to_owned() }.into()
}

/// A path of a recipe, which is relative to the recipe's folder.
fn resolve(recipe: &Recipe, path: &Path) -> Result<PathBuf, ImageError> {
    let path = recipe.folder.join(path);
    fs::canonicalize(&path).map_err(|e| ImageError::file("read", path, e))
}

// A recipe may come with a repository, and a symlink in that repository may point anywhere.
fn resolve_inside(recipe: &Recipe, from: &Path) -> Result<PathBuf, ImageError> {
    let (folder, path) = (resolve(recipe, Path::new(""))?, resolve(recipe, from)?);
    if path.starts_with(&folder) {
        return Ok(path);
    }
    let reason = format!("`{}` is outside the recipe's folder", from.display());
    Err(ImageError::Invalid { reason })
}

/// The Debian suite that a recipe starts from, through recipes in the same folder.
fn debian_suite(recipe: &Recipe) -> Option<String> {
    match &recipe.from {
        Base::Debian { suite, .. } => Some(suite.clone()),
        Base::Image(name) => {
            let sibling = recipe.folder.join(format!("{name}.toml"));
            let parent = Recipe::read(&sibling).ok().filter(|parent| parent.name != recipe.name)?;
            debian_suite(&parent)
        }
        Base::Folder(_) | Base::Tar(_) | Base::Oci(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn copy_source_cannot_leave_recipe_folder() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("recipe/files")).unwrap();
        symlink("files", folder.path().join("recipe/inside")).unwrap();
        symlink("..", folder.path().join("recipe/outside")).unwrap();
        let recipe =
            Recipe::parse("name = \"x\"\nfrom = \"base\"", &folder.path().join("recipe")).unwrap();
        assert!(resolve_inside(&recipe, Path::new("inside")).is_ok());
        assert!(resolve_inside(&recipe, Path::new("outside")).is_err());
        assert!(resolve_inside(&recipe, Path::new("nothing")).is_err());
    }
}
