//! Makes a new home from a backup. Everything is unpacked beside the home and checked before one
//! rename: a kill at any point leaves no home or the whole one.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File},
    io::{self, BufReader},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use harvest_engine::{Driver, Engine, LayerCache, LayerId};
use harvest_store::SCHEMA_VERSION;
use serde::Serialize;

use super::{ABOUT, About, FORMAT, IMAGE_LAYERS, SETTINGS, draft::folder_of, layout};
use crate::{Invocation, config::Config, database, printer::Advice, server_process};

/// Appended to the home's name for the folder to unpack into.
const LOADING: &str = ".loading";

/// A loaded home.
#[derive(Debug, Serialize)]
pub(crate) struct Loaded {
    pub(crate) home: PathBuf,
    #[serde(flatten)]
    pub(crate) about: About,
    /// Layers that snapshots refer to and that are not on this machine.
    pub(crate) missing_layers: usize,
    /// The settings that the backup was made with, if it has them.
    pub(crate) settings: Option<PathBuf>,
}

pub(crate) fn load(ctx: &Invocation, file: &Path) -> Result<Loaded> {
    let config = &ctx.config;
    check_database(config)?;
    let home = std::path::absolute(&config.home).context("cannot find the home")?;
    check_empty(&home)?;
    ctx.print.live("Checking the backup", None);
    let about = check(file)?;
    ctx.print.live("Unpacking the backup", None);
    let staging = Staging::create(&home)?;
    let unpacked = staging.folder.join("home");
    let trash = staging.folder.join("trash");
    private_folder(&unpacked)?;
    private_folder(&trash)?;
    harvest_images::unpack_trees(open(file)?, &unpacked, &trash)
        .with_context(|| format!("cannot unpack {}", file.display()))?;
    if let Some(path) = layout::find_foreign(&unpacked).context("cannot check the backup")? {
        let path = path.strip_prefix(&unpacked).unwrap_or(&path);
        bail!(no_backup(file, &format!(": {path:?} does not belong in one")));
    }
    if !unpacked.join(database::OWN_FILE).is_file() {
        bail!(no_backup(file, ""));
    }
    remove(&unpacked.join(ABOUT))?;
    // Plain folders: the layers come from a tar, not from btrfs's clones.
    let at_staging = Config { store_driver: Driver::Dir, ..config.at(&unpacked) };
    let engine = server_process::open_engine(&at_staging)?;
    // Keeps the image layers until the home that needs them is registered.
    let cache = engine.layer_cache().context("cannot lock the image cache")?;
    adopt_image_layers(&cache, &unpacked.join(IMAGE_LAYERS))?;
    let mut disks = engine.disk_backup().context("cannot lock the disks")?;
    disks.read_snapshots().context("cannot read the snapshots")?;
    let missing_layers = disks.layers().1.len();
    staging.complete(&home)?;
    register(config, &home)?;
    ctx.print.end_live();
    let settings = Some(home.join(SETTINGS)).filter(|path| path.exists());
    Ok(Loaded { home, about, missing_layers, settings })
}

/// The setting `database` would make the server look elsewhere.
fn check_database(config: &Config) -> Result<()> {
    let Some(url) = &config.database else { return Ok(()) };
    let own = config.home.join(database::OWN_FILE);
    if url.file_path() == Some(&*own) {
        return Ok(());
    }
    let message = format!("the setting `database` is {url}; a backup has a database of its own");
    bail!(Advice::new(message, "unset it (HARVEST_DATABASE) for the loaded home"))
}

fn check_empty(home: &Path) -> Result<()> {
    let mut entries = match fs::read_dir(home) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("cannot list {}", home.display()))?,
    };
    if entries.next().is_none() {
        return Ok(());
    }
    let name = home.display();
    let (problem, hint) = match server_process::home_has_server(home) {
        true => ("is in use", format!("`harvest down`, then `mv {name} {name}.old`")),
        false => ("is not empty", format!("`mv {name} {name}.old`, or choose another with --home")),
    };
    bail!(Advice::new(format!("the home {name} {problem}; a backup makes a new one"), hint))
}

fn open(file: &Path) -> Result<BufReader<File>> {
    let opened = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    Ok(BufReader::with_capacity(1 << 16, opened))
}

/// Reads the whole file, so that a damaged one changes nothing, and checks the versions.
fn check(file: &Path) -> Result<About> {
    let found = harvest_images::check_archive(open(file)?, ABOUT).map_err(|error| {
        let message = format!("{} is damaged or no backup", file.display());
        anyhow::Error::new(error).context(Advice::new(message, "use another copy of the file"))
    })?;
    let text = found.ok_or_else(|| no_backup(file, ""))?;
    let about: About = serde_json::from_slice(&text).map_err(|_| no_backup(file, ""))?;
    if about.format != FORMAT || about.schema != SCHEMA_VERSION {
        let message = format!(
            "{} was made by Harvest {} with version {} of the database; this one has version {}",
            file.display(),
            about.version,
            about.schema,
            SCHEMA_VERSION
        );
        let hint = "load it with the program that made it";
        bail!(Advice::new(message, hint));
    }
    Ok(about)
}

fn no_backup(file: &Path, reason: &str) -> Advice {
    let message = format!("{} is no backup{reason}", file.display());
    Advice::new(message, "`harvest backup create` makes one")
}

fn private_folder(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| format!("cannot create {}", path.display()))
}

fn remove(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
}

/// Moves the layers of images into the cache, where the cache lacks them.
fn adopt_image_layers(cache: &LayerCache<'_>, folder: &Path) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("cannot list {}", folder.display()))?,
    };
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let id: LayerId =
            name.parse().with_context(|| format!("the backup has a layer named {name}"))?;
        cache.adopt(&path, &id).context("cannot add to the image cache")?;
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// Opens the home at its final path, so that the cache keeps the layers that it uses.
fn register(config: &Config, home: &Path) -> Result<Engine> {
    server_process::open_engine(&config.at(home)).context("cannot open the loaded home")
}

/// The folder to unpack into, beside the home, locked against another `load`. Removed at the end.
struct Staging {
    folder: PathBuf,
    _lock: File,
}

impl Staging {
    fn create(home: &Path) -> Result<Self> {
        let mut name = OsString::from(home);
        name.push(LOADING);
        let folder = PathBuf::from(name);
        let failed = || format!("cannot create {}", folder.display());
        private_folder(folder_of(home))?;
        private_folder(&folder)?;
        let lock = File::open(&folder).with_context(failed)?;
        if lock.try_lock().is_err() {
            let message =
                format!("another `harvest backup load` unpacks into {}", folder.display());
            bail!(Advice::new(message, "wait for it, or choose another home with --home"));
        }
        let staging = Self { folder, _lock: lock };
        // Left by a load that was killed.
        staging.clear()?;
        Ok(staging)
    }

    fn clear(&self) -> Result<()> {
        let failed = || format!("cannot clear {}", self.folder.display());
        for entry in fs::read_dir(&self.folder).with_context(failed)? {
            fs::remove_dir_all(entry.with_context(failed)?.path()).with_context(failed)?;
        }
        Ok(())
    }

    /// Writes everything to the disk and gives the home its name.
    fn complete(&self, home: &Path) -> Result<()> {
        let unpacked = self.folder.join("home");
        let finish = || -> io::Result<()> {
            rustix::fs::syncfs(&File::open(&unpacked)?)?;
            // Replaces an empty folder and nothing else.
            fs::rename(&unpacked, home)?;
            File::open(folder_of(home))?.sync_all()
        };
        finish().with_context(|| format!("cannot make the home {}", home.display()))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.clear();
        let _ = fs::remove_dir(&self.folder);
    }
}
