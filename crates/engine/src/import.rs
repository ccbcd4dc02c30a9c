//! Images that are not built: a root file system from an archive or a folder, or an image from a registry.
//! Each is unpacked beside the others, brought to the disk, and gets its name last: a crash at any time
//! leaves the old image or the new one.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use harvest_proto::{ImageId, Timestamp};
use ring::digest::{Context, SHA256};
use rustix::fs::{AtFlags, FileType};

use crate::{
    Engine, EngineError, Image,
    archive::{decompressed, read_some},
    build::{Progress, copy::copy_tree, elapsed},
    disk::{Disk, disk_error, hex, random_name},
    layer::disk_usage,
    oci::{self, PullError, PullOptions, Reference},
    recipe::{content_key, is_image_name, key},
    room::What,
    spec::{ImageConfig, LayerId},
    tree,
    unpack::{Form, Target, UnpackError, UnpackLimits, unpack},
};

/// What an image is made from.
pub enum Import<'a> {
    /// A tar, plain or compressed with gzip or zstd.
    Archive {
        /// What to call it in messages.
        name: &'a str,
        /// Its bytes.
        bytes: &'a mut dyn Read,
        /// How many there are, where that is known.
        length: Option<u64>,
    },
    /// A folder with a root file system.
    Folder(&'a Path),
}

impl fmt::Debug for Import<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Import({})", self.words())
    }
}

impl Import<'_> {
    fn words(&self) -> String {
        match self {
            Self::Archive { name, .. } => format!("archive {name}"),
            Self::Folder(path) => format!("folder {}", path.display()),
        }
    }
}

impl Engine {
    /// Makes an image of one layer from a root file system. Whatever has its name is replaced at the end.
    ///
    /// # Errors
    /// When the archive is damaged, hostile or larger than `limits`; the image of that name, if there is
    /// one, stays as it was.
    pub fn image_import(
        &self,
        name: &str,
        from: Import<'_>,
        limits: UnpackLimits,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Image, EngineError> {
        check_name(name)?;
        self.has_room(What::Build)?;
        let _hold = self.disk.hold_cache()?;
        let _turn = self.disk.image_turn(name, progress)?;
        let (started, what) = (Instant::now(), from.words());
        progress(Progress::StepStarted { index: 1, total: 1, what: what.clone() });
        let layer = match from {
            Import::Archive { name, bytes, length } => {
                self.disk.layer_of_archive(name, bytes, length, limits, progress)
            }
            Import::Folder(path) => self.disk.layer_of_folder(path),
        }?;
        progress(Progress::StepDone { index: 1, millis: elapsed(started) });
        let recipe_key = key("", &"import", layer.as_str());
        self.disk.image_publish(name, vec![layer], ImageConfig::default(), recipe_key, what)
    }

    /// Pulls an image from a registry; `name` is what to call it, or else it keeps the last part of its
    /// own. Layers that are there are not fetched again.
    ///
    /// # Errors
    /// When the registry does not answer, or not with what it promised; the image of that name, if there is
    /// one, stays as it was.
    pub fn image_pull(
        &self,
        reference: &str,
        name: Option<&str>,
        options: &PullOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Image, EngineError> {
        let parsed = parse_reference(reference)?;
        let name = name.unwrap_or_else(|| parsed.short_name());
        check_name(name)?;
        self.has_room(What::Build)?;
        let _hold = self.disk.hold_cache()?;
        let _turn = self.disk.image_turn(name, progress)?;
        let pulled = oci::pull(&self.disk, &parsed, options, progress)?;
        let what = format!("{parsed} ({})", pulled.digest);
        let recipe_key = key("", &"pull", &pulled.digest);
        self.disk.image_publish(name, pulled.layers, pulled.config, recipe_key, what)
    }
}

/// Reads a reference to an image in a registry.
pub(crate) fn parse_reference(text: &str) -> Result<Reference, EngineError> {
    text.parse()
        .map_err(|source: PullError| EngineError::Pull { reference: oci::shown(text), source })
}

fn check_name(name: &str) -> Result<(), EngineError> {
    if is_image_name(name) {
        return Ok(());
    }
    let shown: String = name.chars().take(80).collect();
    let reason = format!(
        "`{shown}` cannot name an image: at most 64 lower-case letters, digits, `-`, `_` and `.`, a letter or digit first"
    );
    Err(EngineError::Invalid { reason })
}

impl Disk {
    /// The layer of a folder's content.
    fn layer_of_folder(&self, path: &Path) -> Result<LayerId, EngineError> {
        let path = fs::canonicalize(path).map_err(|e| disk_error("read", path, e))?;
        let layer: LayerId = folder_key(&path)?.parse().expect("hexadecimal text names a layer");
        if self.layer_path(&layer).is_err() {
            self.layer_make(|target| copy_root(&path, target).map(|()| layer.clone()))?;
        }
        Ok(layer)
    }

    // Its key is that of its content, which is known when all of it was read.
    fn layer_of_archive(
        &self,
        name: &str,
        bytes: &mut dyn Read,
        length: Option<u64>,
        limits: UnpackLimits,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<LayerId, EngineError> {
        self.layer_make(|target| {
            let mut source = Watched::new(bytes, length, progress);
            let content = unpack_root(&mut source, name, target, self, limits)?;
            Ok(key("", &"archive", &content).parse().expect("hexadecimal text names a layer"))
        })
    }

    /// Fills a fresh folder by `make` and keeps it as the layer it answers. Nothing is left of one that failed.
    fn layer_make(
        &self,
        make: impl FnOnce(&Path) -> Result<LayerId, EngineError>,
    ) -> Result<LayerId, EngineError> {
        let target = self.building().join(random_name());
        fs::create_dir(&target).map_err(|e| disk_error("create", &target, e))?;
        let made = make(&target).and_then(|layer| self.layer_keep(&target, &layer).map(|()| layer));
        if made.is_err() {
            self.destroy(&target);
        }
        made
    }

    fn image_publish(
        &self,
        name: &str,
        layers: Vec<LayerId>,
        config: ImageConfig,
        recipe_key: String,
        source: String,
    ) -> Result<Image, EngineError> {
        let mut bytes = 0;
        for layer in &layers {
            bytes += disk_usage(&self.layer_path(layer)?)?;
        }
        let created_at = Timestamp::from(SystemTime::now());
        let (id, name) = (ImageId::random(), name.to_owned());
        let image = Image { id, name, layers, config, recipe_key, bytes, created_at, source };
        self.image_write(&image)?;
        Ok(image)
    }
}

/// The key of a folder's content.
pub(crate) fn folder_key(path: &Path) -> Result<String, EngineError> {
    content_key(path).map(|content| key("", &"folder", &content))
}

/// The key of an archive's bytes.
pub(crate) fn archive_key(path: &Path) -> Result<String, EngineError> {
    let failed = |e: io::Error| disk_error("read", path, e);
    let mut file = File::open(path).map_err(failed)?;
    let mut hash = Context::new(&SHA256);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match read_some(&mut file, &mut buffer).map_err(failed)? {
            0 => return Ok(key("", &"archive file", &hex(hash.finish().as_ref()))),
            length => hash.update(&buffer[..length]),
        }
    }
}

/// Unpacks an archive whose key was `expected` when it was looked at.
pub(crate) fn unpack_file(
    path: &Path,
    expected: &str,
    target: &Path,
    disk: &Disk,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), EngineError> {
    let file = File::open(path).map_err(|e| disk_error("read", path, e))?;
    let length = file.metadata().ok().map(|about| about.len());
    let mut file = file;
    let mut source = Watched::new(&mut file, length, progress);
    unpack_root(&mut source, &path.display().to_string(), target, disk, UnpackLimits::default())?;
    if key("", &"archive file", &hex(source.hash.finish().as_ref())) == expected {
        return Ok(());
    }
    Err(EngineError::Invalid { reason: format!("{} changed while it was read", path.display()) })
}

/// Copies a folder that is a root file system: without the devices below `/dev`, and refusing others.
pub(crate) fn copy_root(source: &Path, target: &Path) -> Result<(), EngineError> {
    refuse_saved(source, &source.display().to_string())?;
    copy_tree(source, target)?;
    tree::visit(target, &mut |path, folder, stat| {
        let refused =
            |error| Err(EngineError::Unpack { what: source.display().to_string(), source: error });
        let kind = FileType::from_raw_mode(stat.st_mode);
        let shown = || tree::shown(path);
        if let Some(id) = [stat.st_uid, stat.st_gid].into_iter().find(|id| *id > 65_535) {
            return refused(UnpackError::Owner { path: shown(), id: u64::from(id) });
        }
        match kind {
            FileType::CharacterDevice | FileType::BlockDevice if path.starts_with("dev") => {
                rustix::fs::unlinkat(folder, path.file_name().unwrap_or_default(), AtFlags::empty())
                    .map_err(|e| disk_error("tidy", shown(), e))
            }
            FileType::CharacterDevice | FileType::BlockDevice => {
                refused(UnpackError::Device { path: shown() })
            }
            _ => Ok(()),
        }
    })
}

// Answers the digest of the archive behind its compression.
fn unpack_root(
    source: &mut Watched<'_>,
    name: &str,
    target: &Path,
    disk: &Disk,
    limits: UnpackLimits,
) -> Result<String, EngineError> {
    let failed = |source| EngineError::Unpack { what: name.to_owned(), source };
    let trash = disk.cache_trash();
    let place = Target { layer: target, below: &[], trash: &trash };
    let content = {
        let packed: &mut dyn Read = source;
        let plain = decompressed(packed).map_err(|e| failed(e.into()))?;
        let mut plain = Hashing { source: plain, hash: Context::new(&SHA256) };
        unpack(&mut plain, Form::Tree, &place, limits).map_err(failed)?;
        hex(plain.hash.finish().as_ref())
    };
    // What lies behind the last compressed byte belongs to the file too.
    io::copy(source, &mut io::sink()).map_err(|e| disk_error("read", PathBuf::from(name), e))?;
    refuse_saved(target, name)?;
    Ok(content)
}

// `docker save` and `skopeo copy` make these; nothing in them could be run.
fn refuse_saved(root: &Path, name: &str) -> Result<(), EngineError> {
    let has = |file: &str| fs::symlink_metadata(root.join(file)).is_ok();
    if (has("oci-layout") || has("manifest.json")) && !has("etc") && !has("bin") && !has("usr") {
        let reason = format!(
            "{name} is a saved image, not a root file system: export it (`docker export`), or put it into a registry and pull it"
        );
        return Err(EngineError::Invalid { reason });
    }
    Ok(())
}

struct Hashing<R> {
    source: R,
    hash: Context,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        self.hash.update(&buffer[..length]);
        Ok(length)
    }
}

/// A source whose reading is hashed and told about.
struct Watched<'a> {
    source: &'a mut dyn Read,
    hash: Context,
    done: u64,
    told: u64,
    length: Option<u64>,
    progress: &'a mut dyn FnMut(Progress),
}

impl<'a> Watched<'a> {
    fn new(
        source: &'a mut dyn Read,
        length: Option<u64>,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Self { source, hash: Context::new(&SHA256), done: 0, told: 0, length, progress }
    }
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        self.hash.update(&buffer[..length]);
        self.done += length as u64;
        // A megabyte: often enough for a moving bar.
        if self.done >= self.told + (1 << 20) {
            self.told = self.done;
            (self.progress)(Progress::Bytes { done: self.done, total: self.length });
        }
        Ok(length)
    }
}
