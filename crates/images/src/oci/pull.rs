//! Fetches an image's layers into the cache. A layer's key covers its content and the layers below
//! it, so that images share layers. A layer that fails leaves nothing.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    time::Instant,
};

use harvest_engine::{EngineError, ImageConfig, LayerCache, LayerId, PulledImage};
use harvest_proto::api::ImageLine;
use ureq::BodyReader;

use super::{
    PullError, PullOptions, Reference,
    http::RequestError,
    manifest::{self, Descriptor, Manifest},
    reference::Digest,
    registry::Registry,
};
use crate::{
    ImageError,
    archive::decompressed,
    layer_key::{key, layer_of_key},
    stream::{CountingReader, ReportingReader, StreamStats, elapsed_millis},
    unpack::{ArchiveForm, Target, UnpackError, unpack},
};

// An index may refer to another index; a longer chain is a cycle.
const MAX_INDEXES: usize = 3;

/// Pulls the image of a reference into the cache.
pub(crate) fn pull(
    cache: &LayerCache<'_>,
    reference: &Reference,
    options: &PullOptions,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<PulledImage, ImageError> {
    let failed = |source| ImageError::Pull { reference: reference.to_string(), source };
    let registry = Registry::new(reference, options);
    Pull { registry, cache, options, progress, reference }.run(failed)
}

struct Pull<'a> {
    registry: Registry<'a>,
    reference: &'a Reference,
    cache: &'a LayerCache<'a>,
    options: &'a PullOptions,
    progress: &'a mut dyn FnMut(ImageLine),
}

/// A layer to fetch.
struct LayerBlob<'a> {
    descriptor: &'a Descriptor,
    digest: Digest,
    /// The digest of the uncompressed archive.
    content: &'a Digest,
}

impl Pull<'_> {
    fn run(mut self, failed: impl Fn(PullError) -> ImageError) -> Result<PulledImage, ImageError> {
        let (digest, config, blobs) = self.manifest().map_err(&failed)?;
        let (contents, config) = self.config(&config, blobs.len()).map_err(&failed)?;
        let mut layers: Vec<LayerId> = Vec::new();
        let mut chain = String::new();
        for (at, (blob, content)) in blobs.iter().zip(&contents).enumerate() {
            // The layers below are part of the key: their symlinks decide where files go.
            chain = key(&chain, &"oci layer", content.as_str());
            let layer = layer_of_key(&chain);
            let digest = blob.digest().map_err(&failed)?;
            let blob = LayerBlob { descriptor: blob, digest, content };
            self.layer((at + 1, blobs.len()), &blob, &layer, &layers, &failed)?;
            layers.push(layer);
        }
        Ok(PulledImage { layers, config, digest: digest.to_string() })
    }

    fn manifest(&self) -> Result<(Digest, Descriptor, Vec<Descriptor>), PullError> {
        let mut wanted = self.reference.tag_or_digest().to_owned();
        let mut expected = self.reference.digest.clone();
        for _ in 0..MAX_INDEXES {
            let bytes = self.registry.manifest(&wanted)?;
            let digest = Digest::of(&bytes);
            check("manifest", expected.as_ref().unwrap_or(&digest), &digest)?;
            match manifest::parse(&bytes)? {
                Manifest::Image { config, layers } => return Ok((digest, config, layers)),
                Manifest::Index(chosen) => {
                    let next = chosen.digest()?;
                    (wanted, expected) = (next.to_string(), Some(next));
                }
            }
        }
        Err(PullError::Document {
            what: "manifest",
            reason: "its indexes refer to each other without end".to_owned(),
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
        blob: &LayerBlob<'_>,
        layer: &LayerId,
        below: &[LayerId],
        failed: &dyn Fn(PullError) -> ImageError,
    ) -> Result<(), ImageError> {
        let what = format!(
            "layer {} ({} MB)",
            blob.digest.short(),
            blob.descriptor.size.div_ceil(1_000_000)
        );
        if self.cache.has_layer(layer) {
            (self.progress)(ImageLine::StepCached { index, total, what });
            return Ok(());
        }
        (self.progress)(ImageLine::StepStarted { index, total, what });
        let started = Instant::now();
        let below: Vec<PathBuf> = below
            .iter()
            .rev()
            .map(|layer| self.cache.layer_path(layer))
            .collect::<Result<_, _>>()?;
        let (cache, options) = (self.cache, self.options);
        let progress = &mut self.progress;
        // Each attempt fills a new folder; the one of the last attempt becomes the layer.
        let mut target: Option<PathBuf> = None;
        let fetched = self.registry.blob(blob.digest.as_str(), |body| {
            target.take().iter().for_each(|folder| cache.discard(folder));
            let folder = cache.create_folder().map_err(|error| {
                let source = match error {
                    EngineError::File { source, .. } => source,
                    other => io::Error::other(other),
                };
                refused(blob, UnpackError::File { path: PathBuf::from("/"), source })
            })?;
            let folder = target.insert(folder);
            unpack_blob(body, blob, folder, &below, cache, options, *progress)
        });
        let committed = fetched.map_err(failed).and_then(|()| {
            let folder = target.as_ref().expect("a fetched blob was unpacked into a folder");
            Ok(cache.commit(folder, layer)?)
        });
        if committed.is_err() {
            target.iter().for_each(|folder| cache.discard(folder));
        }
        committed?;
        (self.progress)(ImageLine::StepDone { index, millis: elapsed_millis(started) });
        Ok(())
    }
}

fn refused(blob: &LayerBlob<'_>, source: UnpackError) -> RequestError {
    PullError::Layer { digest: blob.digest.to_string(), source }.into()
}

// Unpacks a blob while it arrives, then checks its size and both digests.
fn unpack_blob(
    body: BodyReader<'static>,
    blob: &LayerBlob<'_>,
    target: &Path,
    below: &[PathBuf],
    cache: &LayerCache<'_>,
    options: &PullOptions,
    progress: &mut dyn FnMut(ImageLine),
) -> Result<(), RequestError> {
    let (packed, plain) = (StreamStats::new(), StreamStats::new());
    let size = blob.descriptor.size;
    // One byte more than the descriptor says proves that the blob is too long.
    let mut body = CountingReader::new(body.take(size.saturating_add(1)), &packed);
    let reporting = ReportingReader::new(&mut body, Some(size), progress);
    let trash = cache.trash();
    let layer = Target { layer: target, below, trash: &trash };
    let unpacked = decompressed(reporting).map_err(UnpackError::Archive).and_then(|tar| {
        unpack(CountingReader::new(tar, &plain), ArchiveForm::Layer, &layer, options.limits)
    });
    if let Some(error) = packed.take_error() {
        return Err(RequestError::Interrupted(error.into()));
    }
    // A digest mismatch explains a malformed archive, so it is checked and reported first.
    let check_digest = matches!(unpacked, Ok(_) | Err(UnpackError::Archive(_)));
    if check_digest {
        io::copy(&mut body, &mut io::sink())
            .map_err(|error| RequestError::Interrupted(error.into()))?;
        let what = || format!("layer {}", blob.digest.short());
        if packed.bytes() < size {
            let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(RequestError::Interrupted(ended.into()));
        }
        if packed.bytes() > size {
            let (expected, found) = (format!("{size} bytes"), "more".to_owned());
            return Err(PullError::Digest { what: what(), expected, found }.into());
        }
        check(&what(), &blob.digest, &Digest::from_hash(packed.hash()))?;
    }
    unpacked.map_err(|source| refused(blob, source))?;
    let what = format!("content of layer {}", blob.digest.short());
    Ok(check(&what, blob.content, &Digest::from_hash(plain.hash()))?)
}

fn check(what: &str, expected: &Digest, found: &Digest) -> Result<(), PullError> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (expected.to_string(), found.to_string());
    Err(PullError::Digest { what: what.to_owned(), expected, found })
}
