//! Brings an image's layers into the cache, each under a key of what it consists of and stands on, so that
//! images share them. A layer that is there is whole; one that fails leaves nothing.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Instant,
};

use ureq::BodyReader;

use super::{
    PullError, PullOptions, Reference,
    manifest::{self, Descriptor, Found},
    reference::Digest,
    registry::{Registry, Taking},
    stream::{Counting, Tally},
};
use crate::{
    EngineError,
    archive::decompressed,
    build::{Progress, elapsed},
    disk::{Disk, random_name},
    recipe::key,
    spec::{ImageConfig, LayerId},
    unpack::{Form, Target, UnpackError, unpack},
};

// An index may name an index; more is a circle.
const DEEPEST: usize = 3;

// Often enough for a moving bar.
const TELL_BYTES: u64 = 1 << 20;

/// What was pulled.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Pulled {
    /// Bottom first.
    pub(crate) layers: Vec<LayerId>,
    pub(crate) config: ImageConfig,
    /// The manifest's digest.
    pub(crate) digest: String,
}

/// Pulls what a reference stands for.
pub(crate) fn pull(
    disk: &Disk,
    reference: &Reference,
    options: &PullOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Pulled, EngineError> {
    let failed = |source| EngineError::Pull { reference: reference.to_string(), source };
    let registry = Registry::new(reference, options);
    let image = Pull { registry, disk, options, progress, reference };
    image.run(failed)
}

struct Pull<'a> {
    registry: Registry<'a>,
    reference: &'a Reference,
    disk: &'a Disk,
    options: &'a PullOptions,
    progress: &'a mut dyn FnMut(Progress),
}

/// One layer to bring.
struct Wanted<'a> {
    blob: &'a Descriptor,
    digest: Digest,
    /// What it adds up to unpacked.
    content: &'a Digest,
}

impl Pull<'_> {
    fn run(mut self, failed: impl Fn(PullError) -> EngineError) -> Result<Pulled, EngineError> {
        let (digest, config, blobs) = self.manifest().map_err(&failed)?;
        let (contents, config) = self.config(&config, blobs.len()).map_err(&failed)?;
        let mut layers: Vec<LayerId> = Vec::new();
        let mut chain = String::new();
        for (at, (blob, content)) in blobs.iter().zip(&contents).enumerate() {
            // Where a layer's files go depends on the links below it: its ground is part of its key.
            chain = key(&chain, &"oci layer", content.as_str());
            let layer: LayerId = chain.parse().expect("hexadecimal text names a layer");
            let wanted = Wanted { blob, digest: blob.digest().map_err(&failed)?, content };
            let place = (at + 1, blobs.len());
            self.layer(place, &wanted, &layer, &layers, &failed)?;
            layers.push(layer);
        }
        Ok(Pulled { layers, config, digest: digest.to_string() })
    }

    fn manifest(&self) -> Result<(Digest, Descriptor, Vec<Descriptor>), PullError> {
        let mut wanted = self.reference.wanted().to_owned();
        let mut expected = self.reference.digest.clone();
        for _ in 0..DEEPEST {
            let bytes = self.registry.manifest(&wanted)?;
            let digest = Digest::of(&bytes);
            check("manifest", expected.as_ref().unwrap_or(&digest), &digest)?;
            match manifest::parse(&bytes)? {
                Found::Manifest { config, layers } => return Ok((digest, config, layers)),
                Found::Index(ours) => {
                    let next = ours.digest()?;
                    (wanted, expected) = (next.to_string(), Some(next));
                }
            }
        }
        Err(PullError::Document {
            what: "manifest",
            reason: "it leads to another without end".to_owned(),
        })
    }

    fn config(
        &self,
        config: &Descriptor,
        layers: usize,
    ) -> Result<(Vec<Digest>, ImageConfig), PullError> {
        let digest = config.digest()?;
        let bytes = self.registry.small_blob(digest.as_str())?;
        check("image's configuration", &digest, &Digest::of(&bytes))?;
        manifest::parse_config(&bytes, layers)
    }

    fn layer(
        &mut self,
        (index, total): (usize, usize),
        wanted: &Wanted<'_>,
        layer: &LayerId,
        below: &[LayerId],
        failed: &dyn Fn(PullError) -> EngineError,
    ) -> Result<(), EngineError> {
        let what = format!(
            "layer {} ({} MB)",
            wanted.digest.short(),
            wanted.blob.size.div_ceil(1_000_000)
        );
        if self.disk.layer_path(layer).is_ok() {
            (self.progress)(Progress::StepCached { index, total, what });
            return Ok(());
        }
        (self.progress)(Progress::StepStarted { index, total, what });
        let started = Instant::now();
        let below: Vec<PathBuf> = below
            .iter()
            .rev()
            .map(|layer| self.disk.layer_path(layer))
            .collect::<Result<_, _>>()?;
        let (disk, options) = (self.disk, self.options);
        let progress = &mut self.progress;
        // Made by each attempt anew; the last one becomes the layer.
        let mut target = PathBuf::new();
        let brought = self.registry.blob(wanted.digest.as_str(), |body| {
            discard(disk, &target);
            target = disk.building().join(random_name());
            let made = fs::create_dir(&target).map_err(|source| {
                let path = PathBuf::from("/");
                refused(wanted, UnpackError::File { path, source })
            });
            made.and_then(|()| take(body, wanted, &target, &below, disk, options, *progress))
        });
        let kept = brought.map_err(failed).and_then(|()| disk.layer_keep(&target, layer));
        if kept.is_err() {
            discard(disk, &target);
        }
        kept?;
        (self.progress)(Progress::StepDone { index, millis: elapsed(started) });
        Ok(())
    }
}

fn discard(disk: &Disk, target: &Path) {
    if !target.as_os_str().is_empty() {
        disk.destroy(target);
    }
}

fn refused(wanted: &Wanted<'_>, source: UnpackError) -> Taking {
    Taking::Refused(PullError::Layer { digest: wanted.digest.to_string(), source })
}

// Unpacks a blob while it comes in, and believes it only when everything adds up.
fn take(
    body: BodyReader<'static>,
    wanted: &Wanted<'_>,
    target: &Path,
    below: &[PathBuf],
    disk: &Disk,
    options: &PullOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), Taking> {
    let (packed, plain) = (Tally::new(), Tally::new());
    let size = wanted.blob.size;
    // One byte more than promised is enough to know.
    let mut body = Counting::new(body.take(size.saturating_add(1)), &packed);
    let mut told = 0;
    let telling = Telling {
        source: &mut body,
        each: &mut || {
            if packed.bytes() >= told + TELL_BYTES {
                told = packed.bytes();
                progress(Progress::Bytes { done: told, total: Some(size) });
            }
        },
    };
    let trash = disk.cache_trash();
    let place = Target { layer: target, below, trash: &trash };
    let unpacked = decompressed(telling)
        .map_err(UnpackError::Archive)
        .and_then(|tar| unpack(Counting::new(tar, &plain), Form::Layer, &place, options.limits));
    if let Some(error) = packed.broke() {
        return Err(Taking::Broke(error));
    }
    // What is wrong with the bytes themselves explains whatever went wrong with what they mean.
    let suspicious = matches!(unpacked, Ok(_) | Err(UnpackError::Archive(_)));
    if suspicious {
        io::copy(&mut body, &mut io::sink()).map_err(Taking::Broke)?;
        let what = || format!("layer {}", wanted.digest.short());
        let sized = |bytes: u64| format!("{bytes} bytes");
        if packed.bytes() < size {
            return Err(Taking::Broke(io::ErrorKind::UnexpectedEof.into()));
        }
        if packed.bytes() > size {
            let (expected, found) = (sized(size), "more".to_owned());
            return Err(Taking::Refused(PullError::Digest { what: what(), expected, found }));
        }
        check(&what(), &wanted.digest, &packed.digest()).map_err(Taking::Refused)?;
    }
    unpacked.map_err(|source| refused(wanted, source))?;
    check(&format!("content of layer {}", wanted.digest.short()), wanted.content, &plain.digest())
        .map_err(Taking::Refused)
}

/// Tells somebody after each read.
struct Telling<'a, R> {
    source: &'a mut R,
    each: &'a mut dyn FnMut(),
}

impl<R: Read> Read for Telling<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        (self.each)();
        Ok(length)
    }
}

fn check(what: &str, expected: &Digest, found: &Digest) -> Result<(), PullError> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (expected.to_string(), found.to_string());
    Err(PullError::Digest { what: what.to_owned(), expected, found })
}
