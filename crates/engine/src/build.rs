//! Builds images: walks a recipe's steps, takes those whose layer is there, and makes the others in a
//! sandbox whose writable layer becomes the step's. A step that fails leaves the old image as it was.

pub(crate) mod copy;
pub(crate) mod host;
mod passwords;
mod step;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use harvest_proto::{ImageId, SandboxId, Timestamp, bridge::Exit};

use crate::{
    Engine, EngineError, Image, Limits, Network, Origin, Owner, Spec, bootstrap,
    disk::{self, Disk, disk_error, random_name},
    guest::Guest,
    import,
    layer::disk_usage,
    oci::{self, Pulled},
    recipe::{Base, Make, Recipe, content_key, key},
    room::What,
    spec::{ImageConfig, LayerId},
};
use host::HostFolder;
pub(crate) use step::Tail;
use step::{Lines, scrub, shell, words, words_of_base};

// Images that start from each other: more is a circle.
const DEEPEST: usize = 8;

/// How to build.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BuildOptions {
    /// Make every step again, even those whose layer is there.
    pub force: bool,
}

/// How a build comes along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Somebody else builds this image; their result is waited for.
    Waiting {
        /// Its name.
        image: String,
    },
    /// A step begins.
    StepStarted {
        /// Counted from 1; the base is 1.
        index: usize,
        /// How many there are.
        total: usize,
        /// The step in words.
        what: String,
    },
    /// A step's layer is there already.
    StepCached {
        /// Counted from 1.
        index: usize,
        /// How many there are.
        total: usize,
        /// The step in words.
        what: String,
    },
    /// So much of what comes from elsewhere is there.
    Bytes {
        /// Read so far.
        done: u64,
        /// All of it, where that is known.
        total: Option<u64>,
    },
    /// A step said something.
    Output {
        /// One line.
        line: String,
    },
    /// A step is done.
    StepDone {
        /// Counted from 1.
        index: usize,
        /// From beginning to end.
        millis: u64,
    },
}

impl Engine {
    /// Builds the image a recipe describes, and first the one it starts from when that has its recipe
    /// beside this one. What has not changed is not made again. Two builds of one image: the second
    /// waits and takes the first one's result.
    ///
    /// # Errors
    /// When a step fails; the image of that name, if there is one, stays as it was.
    pub fn image_build(
        &self,
        recipe: &Recipe,
        options: BuildOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Image, EngineError> {
        // What is built on and what is built stays until this returns.
        self.store.wake()?;
        let _hold = self.disk.hold_cache()?;
        Build { engine: self, disk: &self.disk, options, progress }.image(recipe, 0)
    }
}

struct Build<'a> {
    engine: &'a Engine,
    disk: &'a Disk,
    options: BuildOptions,
    progress: &'a mut dyn FnMut(Progress),
}

/// How far a build has come.
#[derive(Default)]
struct Ground {
    /// Stands for everything so far.
    key: String,
    layers: Vec<LayerId>,
    config: ImageConfig,
    /// Which layer stands for a key, for steps made again.
    renamed: BTreeMap<String, LayerId>,
    /// The Debian below, if there is one.
    suite: Option<String>,
}

impl Build<'_> {
    fn image(&mut self, recipe: &Recipe, depth: usize) -> Result<Image, EngineError> {
        if depth == DEEPEST {
            let reason = format!("image `{}` starts, in the end, from itself", recipe.name);
            return Err(EngineError::Invalid { reason });
        }
        let parent = self.parent(recipe, depth)?;
        let _turn = self.disk.image_turn(&recipe.name, self.progress)?;
        let pulled = self.pulled(recipe)?;
        let keys = self.keys(recipe, parent.as_ref(), pulled.as_ref())?;
        let total = keys.len();
        let last = keys.last().expect("every recipe has a base").clone();
        if let Some(image) = self.unchanged(&recipe.name, &last)? {
            self.tell_cached(recipe, total);
            return Ok(image);
        }
        let mut ground = Ground { suite: suite_below(recipe), ..Ground::default() };
        match (parent, pulled) {
            (Some(parent), _) => {
                (ground.layers, ground.config) = (parent.layers, parent.config);
                (self.progress)(Progress::StepCached {
                    index: 1,
                    total,
                    what: words_of_base(&recipe.from),
                });
            }
            (None, Some(pulled)) => (ground.layers, ground.config) = (pulled.layers, pulled.config),
            (None, None) => self.base(recipe, &keys[0], total, &mut ground)?,
        }
        for (at, step) in recipe.steps.iter().enumerate() {
            self.step(recipe, step, (at + 2, total), &keys[at + 1], &mut ground)?;
        }
        ground.key = last;
        self.publish(recipe, ground)
    }

    fn parent(&mut self, recipe: &Recipe, depth: usize) -> Result<Option<Image>, EngineError> {
        let Base::Image(name) = &recipe.from else { return Ok(None) };
        let beside = recipe.folder.join(format!("{name}.toml"));
        if *name != recipe.name && beside.is_file() {
            return self.image(&Recipe::read(&beside)?, depth + 1).map(Some);
        }
        match self.disk.image(name)? {
            Some(image) if *name != recipe.name => Ok(Some(image)),
            _ => Err(EngineError::ImageMissing { image: name.clone() }),
        }
    }

    // A key for the base and for each step. The layers below count, not only their recipe: an image
    // made again by force is another ground.
    fn keys(
        &self,
        recipe: &Recipe,
        parent: Option<&Image>,
        pulled: Option<&Pulled>,
    ) -> Result<Vec<String>, EngineError> {
        let mut keys = vec![match (&recipe.from, parent) {
            (Base::Folder(folder), _) => import::folder_key(&base_folder(recipe, folder)?)?,
            (Base::Tar(file), _) => import::archive_key(&base_folder(recipe, file)?)?,
            (_, Some(parent)) => key(&parent.recipe_key, &parent.layers, ""),
            (base, None) => key("", base, pulled.map_or("", |pulled| &pulled.digest)),
        }];
        for step in &recipe.steps {
            let content = match step {
                Make::Copy { from, .. } => content_key(&beside(recipe, from)?)?,
                _ => String::new(),
            };
            keys.push(key(&keys[keys.len() - 1], step, &content));
        }
        Ok(keys)
    }

    fn unchanged(&self, name: &str, key: &str) -> Result<Option<Image>, EngineError> {
        let image =
            self.disk.image(name)?.filter(|image| !self.options.force && image.recipe_key == key);
        Ok(image
            .filter(|image| image.layers.iter().all(|layer| self.disk.layer_path(layer).is_ok())))
    }

    fn tell_cached(&mut self, recipe: &Recipe, total: usize) {
        let steps = recipe.steps.iter().map(words);
        for (at, what) in [words_of_base(&recipe.from)].into_iter().chain(steps).enumerate() {
            (self.progress)(Progress::StepCached { index: at + 1, total, what });
        }
    }

    fn base(
        &mut self,
        recipe: &Recipe,
        key: &str,
        total: usize,
        ground: &mut Ground,
    ) -> Result<(), EngineError> {
        let what = words_of_base(&recipe.from);
        self.layer((1, total), &what, key, ground, |build, target, _| match &recipe.from {
            Base::Debian { suite, include } => {
                bootstrap::debian(suite, include, target, &mut |line| {
                    (build.progress)(Progress::Output { line: line.to_owned() });
                })
            }
            Base::Folder(folder) => import::copy_root(&base_folder(recipe, folder)?, target),
            Base::Tar(file) => import::unpack_file(
                &base_folder(recipe, file)?,
                key,
                target,
                build.disk,
                build.progress,
            ),
            Base::Image(image) => Err(EngineError::ImageMissing { image: image.clone() }),
            Base::Oci(reference) => Err(EngineError::ImageMissing { image: reference.clone() }),
        })
    }

    // A reference is asked for once and then stands for what it stood for, as a Debian does: only force
    // looks again. So an unchanged recipe needs no registry.
    fn pulled(&mut self, recipe: &Recipe) -> Result<Option<Pulled>, EngineError> {
        let Base::Oci(text) = &recipe.from else { return Ok(None) };
        let reference = import::parse_reference(text)?;
        let record = self.disk.pulled().join(format!("{}.json", key("", &recipe.from, "")));
        let known: Option<Pulled> = disk::read_record(&record)?;
        let there =
            |pulled: &Pulled| pulled.layers.iter().all(|layer| self.disk.layer_path(layer).is_ok());
        let (index, total, what) = (1, recipe.steps.len() + 1, words_of_base(&recipe.from));
        if let Some(known) = known.filter(|known| !self.options.force && there(known)) {
            (self.progress)(Progress::StepCached { index, total, what });
            return Ok(Some(known));
        }
        self.engine.has_room(What::Build)?;
        (self.progress)(Progress::StepStarted { index, total, what });
        let started = Instant::now();
        let progress = &mut self.progress;
        // The layers are parts of this one step.
        let mut tell = |inner| match inner {
            Progress::StepStarted { index, total, what } => {
                progress(Progress::Output { line: format!("fetching {index}/{total} {what}") });
            }
            bytes @ Progress::Bytes { .. } => progress(bytes),
            _ => {}
        };
        let pulled = oci::pull(self.disk, &reference, &oci::PullOptions::default(), &mut tell)?;
        disk::write_record(&record, &pulled)?;
        (self.progress)(Progress::StepDone { index, millis: elapsed(started) });
        Ok(Some(pulled))
    }

    fn step(
        &mut self,
        recipe: &Recipe,
        step: &Make,
        place: (usize, usize),
        key: &str,
        ground: &mut Ground,
    ) -> Result<(), EngineError> {
        match step {
            Make::Env(env) => ground.config.env.extend(env.clone()),
            Make::User(user) => ground.config.user.clone_from(user),
            Make::Workdir(workdir) => ground.config.workdir.clone_from(workdir),
            Make::Copy { from, to } => {
                return self.layer(place, &words(step), key, ground, |build, target, ground| {
                    copy::copy_into(target, &build.below(ground)?, &beside(recipe, from)?, to)
                });
            }
            Make::Apt(_) | Make::Npm(_) | Make::Pip(_) | Make::Run(_) => {
                return self.layer(place, &words(step), key, ground, |build, target, ground| {
                    build.run(step, target, ground)
                });
            }
        }
        Ok(())
    }

    /// Adds the layer of `key` to the ground, made by `make` in an empty folder unless it is there.
    fn layer(
        &mut self,
        (index, total): (usize, usize),
        what: &str,
        key: &str,
        ground: &mut Ground,
        make: impl FnOnce(&mut Self, &Path, &Ground) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        if !self.options.force
            && let Some(layer) = self.known(key)?
        {
            (self.progress)(Progress::StepCached { index, total, what: what.to_owned() });
            ground.layers.push(layer);
            return Ok(());
        }
        self.engine.has_room(What::Build)?;
        (self.progress)(Progress::StepStarted { index, total, what: what.to_owned() });
        let started = Instant::now();
        let target = self.disk.building().join(random_name());
        fs::create_dir(&target).map_err(|e| disk_error("create", &target, e))?;
        let made = make(self, &target, ground).and_then(|()| self.store(&target, key, ground));
        match made {
            Ok(layer) => ground.layers.push(layer),
            Err(error) => {
                self.disk.destroy(&target);
                return Err(error);
            }
        }
        (self.progress)(Progress::StepDone { index, millis: elapsed(started) });
        Ok(())
    }

    fn known(&self, key: &str) -> Result<Option<LayerId>, EngineError> {
        let renamed: Option<LayerId> =
            disk::read_record(&self.disk.steps().join(format!("{key}.json")))?;
        let layer = renamed.unwrap_or_else(|| key.parse().expect("hexadecimal text names a layer"));
        Ok(self.disk.layer_path(&layer).is_ok().then_some(layer))
    }

    fn store(
        &mut self,
        target: &Path,
        key: &str,
        ground: &mut Ground,
    ) -> Result<LayerId, EngineError> {
        let parse = |text: &str| text.parse::<LayerId>().expect("hexadecimal text names a layer");
        let layer = if self.options.force {
            let fresh = parse(&random_name());
            ground.renamed.insert(key.to_owned(), fresh.clone());
            fresh
        } else {
            parse(key)
        };
        self.disk.layer_keep(target, &layer)?;
        Ok(layer)
    }

    fn below(&self, ground: &Ground) -> Result<Vec<PathBuf>, EngineError> {
        ground.layers.iter().rev().map(|layer| self.disk.layer_path(layer)).collect()
    }

    fn run(&mut self, step: &Make, target: &Path, ground: &Ground) -> Result<(), EngineError> {
        let folder = self.disk.building().join(format!("host-{}", random_name()));
        let host = HostFolder::make(folder, ground.suite.as_deref())?;
        let has_sources = copy::has_file(&self.below(ground)?, Path::new(bootstrap::SOURCES));
        let spec = Spec {
            id: SandboxId::random(),
            from: Origin::Layers { layers: ground.layers.clone(), config: ground.config.clone() },
            // A build is the host's own: it may fill what the host gives it.
            limits: Limits { writable_bytes: None, ..Limits::default() },
            network: Network::Host,
            owner: Owner::Process(std::process::id()),
            binds: host.binds(has_sources),
            volumes: Vec::new(),
            env: host.env.clone(),
            made_by: None,
        };
        let running = self.engine.start(&spec)?;
        let made = self
            .command(&running.bridge, step, &ground.config, &host)
            .and_then(|()| self.take_upper(&spec.id, target));
        let removed = self.engine.remove(&spec.id);
        made.and(removed)
    }

    fn command(
        &mut self,
        bridge: &Path,
        step: &Make,
        config: &ImageConfig,
        host: &HostFolder,
    ) -> Result<(), EngineError> {
        let what = words(step);
        let broken = |source| EngineError::Bridge { doing: format!("run `{what}`"), source };
        let mut guest = Guest::dial(bridge).map_err(broken)?;
        let (mut tail, mut lines) = (Tail::default(), Lines::default());
        let progress = &mut self.progress;
        let mut say = |line: &str| {
            let line = host.redaction.cover(line);
            tail.push(&line);
            progress(Progress::Output { line });
        };
        let command = shell(step, config, &host.env);
        let exit = guest
            .exec(command, b"", &mut |_, bytes| lines.push(bytes, &mut say))
            .map_err(broken)?;
        lines.finish(&mut say);
        let how = match exit {
            Exit::Code(0) => return Ok(()),
            Exit::Code(code) => format!("it exited with {code}"),
            Exit::Signal(signal) => format!("it was ended by signal {signal}"),
            Exit::Oom => "it ran out of memory".to_owned(),
            Exit::Timeout => "it took longer than 30 minutes".to_owned(),
            Exit::Killed => "it was killed".to_owned(),
        };
        tail.push(&how);
        Err(EngineError::Build {
            what,
            tail: tail.lines(),
            hint: "the lines above are the last it said",
        })
    }

    fn take_upper(&self, id: &SandboxId, target: &Path) -> Result<(), EngineError> {
        self.engine.kill(id)?;
        let upper = self.engine.home.writable(id).join("upper");
        match fs::rename(&upper, target) {
            // Home and cache on two file systems.
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                copy::copy_tree(&upper, target)?
            }
            other => other.map_err(|e| disk_error("keep", &upper, e))?,
        }
        scrub(target)
    }

    fn publish(&mut self, recipe: &Recipe, ground: Ground) -> Result<Image, EngineError> {
        for (key, layer) in &ground.renamed {
            disk::write_record(&self.disk.steps().join(format!("{key}.json")), layer)?;
        }
        let mut bytes = 0;
        for path in self.below(&ground)? {
            bytes += disk_usage(&path)?;
        }
        let image = Image {
            id: ImageId::random(),
            name: recipe.name.clone(),
            layers: ground.layers,
            config: ground.config,
            recipe_key: ground.key,
            bytes,
            created_at: Timestamp::from(SystemTime::now()),
            source: format!("recipe, {}", words_of_base(&recipe.from)),
        };
        self.disk.image_write(&image)?;
        Ok(image)
    }
}

/// Milliseconds since then.
pub(crate) fn elapsed(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn base_folder(recipe: &Recipe, folder: &Path) -> Result<PathBuf, EngineError> {
    let path = recipe.folder.join(folder);
    fs::canonicalize(&path).map_err(|e| disk_error("read", path, e))
}

// A recipe may come with a repository, whose links may lead anywhere.
fn beside(recipe: &Recipe, from: &Path) -> Result<PathBuf, EngineError> {
    let (folder, path) = (base_folder(recipe, Path::new(""))?, base_folder(recipe, from)?);
    if path.starts_with(&folder) {
        return Ok(path);
    }
    let reason = format!("`{}` leads out of the recipe's folder", from.display());
    Err(EngineError::Invalid { reason })
}

fn suite_below(recipe: &Recipe) -> Option<String> {
    match &recipe.from {
        Base::Debian { suite, .. } => Some(suite.clone()),
        Base::Image(name) => {
            let beside = recipe.folder.join(format!("{name}.toml"));
            let parent = Recipe::read(&beside).ok().filter(|parent| parent.name != recipe.name)?;
            suite_below(&parent)
        }
        Base::Folder(_) | Base::Tar(_) | Base::Oci(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_beside_a_recipe_copies_nothing_from_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("recipe/files")).unwrap();
        std::os::unix::fs::symlink("files", folder.path().join("recipe/inside")).unwrap();
        std::os::unix::fs::symlink("..", folder.path().join("recipe/outside")).unwrap();
        let recipe =
            Recipe::parse("name = \"x\"\nfrom = \"base\"", &folder.path().join("recipe")).unwrap();
        assert!(beside(&recipe, Path::new("inside")).is_ok());
        assert!(beside(&recipe, Path::new("outside")).is_err());
        assert!(beside(&recipe, Path::new("nothing")).is_err());
    }
}
