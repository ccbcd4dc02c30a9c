//! Makes images without a recipe: from an archive or folder with a root file system, or from a
//! registry. Files are written into a new layer and the image's record last, so a crash at any time
//! leaves the old image or the new one.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

use harvest_engine::{
    AGENTS_FILE, Engine, Image, ImageConfig, LayerCache, LayerId, copy_tree, is_image_name, tree,
};
use harvest_proto::{ImageId, Timestamp, api::ImageLine};
use rustix::fs::{AtFlags, FileType};

use crate::{
    ImageError,
    archive::decompressed,
    build::copy::open_file,
    layer_key::{content_key, key, layer_of_key},
    oci::{self, Digest, PullError, PullOptions, Reference},
    stream::{CountingReader, ReportingReader, StreamStats, elapsed_millis, hex},
    unpack::{ArchiveForm, Target, UnpackError, UnpackLimits, unpack},
};

/// A root file system to import.
pub enum Import<'a> {
    /// A tar, plain or compressed with gzip or zstd.
    Archive {
        /// What messages call the archive.
        name: &'a str,
        /// The archive.
        bytes: &'a mut dyn Read,
        /// The archive's size, where that is known.
        length: Option<u64>,
    },
    /// A folder of the host.
    Folder(&'a Path),
}

impl fmt::Debug for Import<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Import({})", self.describe())
    }
}

impl Import<'_> {
    fn describe(&self) -> String {
        match self {
            Self::Archive { name, .. } => format!("archive {name}"),
            Self::Folder(path) => format!("folder {}", path.display()),
        }
    }
}

/// Makes an image of one layer from a root file system and replaces the image of that name.
///
/// # Errors
/// When the archive is damaged, hostile or larger than `limits`; the image of that name, if there
/// is one, stays unchanged.
pub fn import(
    engine: &Engine,
    name: &str,
    from: Import<'_>,
    limits: UnpackLimits,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<Image, ImageError> {
    check_name(name)?;
    let cache = engine.layer_cache()?;
    cache.check_space()?;
    let _lock = lock_image(&cache, name, progress)?;
    let (started, what) = (Instant::now(), from.describe());
    progress(ImageLine::StepStarted { index: 1, total: 1, what: what.clone() });
    let layer = match from {
        Import::Archive { name, bytes, length } => {
            layer_from_archive(&cache, name, bytes, length, limits, progress)
        }
        Import::Folder(path) => layer_from_folder(&cache, path),
    }?;
    progress(ImageLine::StepDone { index: 1, millis: elapsed_millis(started) });
    let recipe_key = key("", &"import", layer.as_str());
    write_image(&cache, name, vec![layer], ImageConfig::default(), recipe_key, what)
}

/// Pulls an image from a registry. Without `name` the image gets the last part of its name in the
/// registry. Layers that are in the cache are not fetched again.
///
/// # Errors
/// When the registry does not answer, or its answer does not match its digests; the image of that
/// name, if there is one, stays unchanged.
pub fn pull(
    engine: &Engine,
    reference: &str,
    name: Option<&str>,
    options: &PullOptions,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<Image, ImageError> {
    let parsed = parse_reference(reference)?;
    let name = name.unwrap_or_else(|| parsed.short_name());
    check_name(name)?;
    let cache = engine.layer_cache()?;
    cache.check_space()?;
    let _lock = lock_image(&cache, name, progress)?;
    let pulled = oci::pull(&cache, &parsed, options, progress)?;
    let source = format!("{parsed} ({})", pulled.digest);
    let recipe_key = key("", &"pull", &pulled.digest);
    write_image(&cache, name, pulled.layers, pulled.config, recipe_key, source)
}

/// Parses a reference to an image in a registry.
pub(crate) fn parse_reference(text: &str) -> Result<Reference, ImageError> {
    text.parse()
        .map_err(|source: PullError| ImageError::Pull { reference: oci::shown(text), source })
}

/// Locks an image's name; reports when another process holds the lock.
pub(crate) fn lock_image(
    cache: &LayerCache<'_>,
    name: &str,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<File, ImageError> {
    let waiting = &mut || progress(ImageLine::Waiting { image: name.to_owned() });
    Ok(cache.lock_image(name, waiting)?)
}

fn check_name(name: &str) -> Result<(), ImageError> {
    if is_image_name(name) {
        return Ok(());
    }
    let shown: String = name.chars().take(80).collect();
    let reason = format!(
        "`{shown}` is not a valid image name: use at most 64 lower-case letters, digits, `-`, `_` \
         and `.`, and begin with a letter or digit"
    );
    Err(ImageError::Invalid { reason })
}

fn layer_from_folder(cache: &LayerCache<'_>, path: &Path) -> Result<LayerId, ImageError> {
    let path = fs::canonicalize(path).map_err(|e| ImageError::file("read", path, e))?;
    let layer = layer_of_key(&folder_key(&path)?);
    if !cache.has_layer(&layer) {
        make_layer(cache, |target| copy_root(&path, target).map(|()| layer.clone()))?;
    }
    Ok(layer)
}

// The layer's key is the digest of the content, which is known only after all of it was read.
fn layer_from_archive(
    cache: &LayerCache<'_>,
    name: &str,
    bytes: &mut dyn Read,
    length: Option<u64>,
    limits: UnpackLimits,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<LayerId, ImageError> {
    make_layer(cache, |target| {
        let mut source = ReportingReader::new(bytes, length, progress);
        let content = unpack_root(&mut source, name, target, cache, limits)?;
        Ok(layer_of_key(&key("", &"archive", content.hex())))
    })
}

/// Commits the folder that `make` fills as the layer that `make` returns.
fn make_layer(
    cache: &LayerCache<'_>,
    make: impl FnOnce(&Path) -> Result<LayerId, ImageError>,
) -> Result<LayerId, ImageError> {
    let target = cache.create_folder()?;
    let made = make(&target).and_then(|layer| {
        cache.commit(&target, &layer)?;
        Ok(layer)
    });
    if made.is_err() {
        cache.discard(&target);
    }
    made
}

/// The key of a folder's content.
pub(crate) fn folder_key(path: &Path) -> Result<String, ImageError> {
    content_key(path).map(|content| key("", &"folder", &content))
}

/// The key of an archive's bytes.
pub(crate) fn archive_key(path: &Path) -> Result<String, ImageError> {
    let stats = StreamStats::new();
    File::open(path)
        .and_then(|file| io::copy(&mut CountingReader::new(file, &stats), &mut io::sink()))
        .map_err(|e| ImageError::file("read", path, e))?;
    Ok(key("", &"archive file", &hex(stats.hash().as_ref())))
}

/// Unpacks an archive file; fails when its key is no longer `expected`.
pub(crate) fn unpack_file(
    path: &Path,
    expected: &str,
    target: &Path,
    cache: &LayerCache<'_>,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<(), ImageError> {
    let file = File::open(path).map_err(|e| ImageError::file("read", path, e))?;
    let length = file.metadata().ok().map(|metadata| metadata.len());
    let stats = StreamStats::new();
    let mut source = ReportingReader::new(CountingReader::new(file, &stats), length, progress);
    unpack_root(&mut source, &path.display().to_string(), target, cache, UnpackLimits::default())?;
    if key("", &"archive file", &hex(stats.hash().as_ref())) == expected {
        return Ok(());
    }
    Err(ImageError::Invalid { reason: format!("{} changed while it was read", path.display()) })
}

/// Copies a folder that is a root file system. Leaves out devices below `/dev` and refuses others.
pub(crate) fn copy_root(source: &Path, target: &Path) -> Result<(), ImageError> {
    refuse_saved_image(source, &source.display().to_string())?;
    copy_tree(source, target)?;
    tree::visit(target, &mut |path, folder, stat| {
        let refused =
            |error| Err(ImageError::Unpack { what: source.display().to_string(), source: error });
        let shown = || tree::truncate_path(path);
        if let Some(id) = [stat.st_uid, stat.st_gid].into_iter().find(|id| *id > 65_535) {
            return refused(UnpackError::Owner { path: shown(), id: u64::from(id) });
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice | FileType::BlockDevice if path.starts_with("dev") => {
                rustix::fs::unlinkat(folder, path.file_name().unwrap_or_default(), AtFlags::empty())
                    .map_err(|e| ImageError::file("remove", shown(), e))
            }
            FileType::CharacterDevice | FileType::BlockDevice => {
                refused(UnpackError::Device { path: shown() })
            }
            _ => Ok(()),
        }
    })
}

/// Unpacks a root file system and returns the digest of the uncompressed archive.
fn unpack_root(
    source: &mut dyn Read,
    name: &str,
    target: &Path,
    cache: &LayerCache<'_>,
    limits: UnpackLimits,
) -> Result<Digest, ImageError> {
    let failed = |source| ImageError::Unpack { what: name.to_owned(), source };
    let trash = cache.trash();
    let target_layer = Target { layer: target, below: &[], trash: &trash };
    let content = StreamStats::new();
    let plain = decompressed(&mut *source).map_err(|e| failed(e.into()))?;
    let plain = CountingReader::new(plain, &content);
    unpack(plain, ArchiveForm::RootFs, &target_layer, limits).map_err(failed)?;
    // Bytes after the end of the compressed stream are part of the file's digest.
    io::copy(source, &mut io::sink())
        .map_err(|e| ImageError::file("read", PathBuf::from(name), e))?;
    refuse_saved_image(target, name)?;
    Ok(Digest::from_hash(content.hash()))
}

// `docker save` and `skopeo copy` write such archives; they hold layers, not a root file system.
fn refuse_saved_image(root: &Path, name: &str) -> Result<(), ImageError> {
    let has = |file: &str| fs::symlink_metadata(root.join(file)).is_ok();
    if (has("oci-layout") || has("manifest.json")) && !has("etc") && !has("bin") && !has("usr") {
        let reason = format!(
            "{name} is a saved image, not a root file system: use `docker export` instead of \
             `docker save`, or push the image to a registry and pull it"
        );
        return Err(ImageError::Invalid { reason });
    }
    Ok(())
}

/// Writes the record of an image, which makes it the one of its name.
pub(crate) fn write_image(
    cache: &LayerCache<'_>,
    name: &str,
    layers: Vec<LayerId>,
    mut config: ImageConfig,
    recipe_key: String,
    source: String,
) -> Result<Image, ImageError> {
    config.agents = stated_agents(cache, &layers)?;
    let bytes = cache.tree_bytes(&layers)?;
    let created_at = Timestamp::from(SystemTime::now());
    let (id, name) = (ImageId::random(), name.to_owned());
    let image = Image { id, name, layers, config, recipe_key, bytes, created_at, source };
    cache.write_image(&image)?;
    Ok(image)
}

// A statement is a few dozen bytes; the file comes from the image, which may be hostile.
const MAX_AGENTS_BYTES: u64 = 64 * 1024;

/// The agents that an image states. The record keeps them, so that nothing has to be mounted to
/// know whether a session can start.
fn stated_agents(
    cache: &LayerCache<'_>,
    layers: &[LayerId],
) -> Result<BTreeMap<String, String>, ImageError> {
    let top_first = layers.iter().rev().map(|layer| cache.layer_path(layer));
    let paths = top_first.collect::<Result<Vec<_>, _>>()?;
    let Some(file) = open_file(&paths, Path::new(AGENTS_FILE)) else {
        return Ok(BTreeMap::new());
    };
    serde_json::from_reader(file.take(MAX_AGENTS_BYTES)).map_err(|error| {
        let reason = format!("/{AGENTS_FILE} is no JSON object of agents and versions: {error}");
        ImageError::Invalid { reason }
    })
}
