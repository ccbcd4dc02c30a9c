//! The trait for images.

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use harvest_proto::api::{CreateImage, Image, ImageLine, ImageUsage};

use super::HostError;

/// Progress of an image build; the last line is `made` or `failed`.
pub type ImageLines = BoxStream<'static, ImageLine>;

/// A streamed tar archive; an error means that the upload broke off.
pub type Archive = BoxStream<'static, std::io::Result<Vec<u8>>>;

/// An image to import from a tar archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportImage {
    pub name: String,
    /// Describes where the archive comes from.
    pub source: Option<String>,
    /// The largest unpacked size.
    pub max_bytes: Option<u64>,
}

/// Creates, finds and removes images.
#[async_trait]
pub trait Images: Send + Sync {
    /// Lists every image by name.
    async fn image_list(&self) -> Result<Vec<Image>, HostError>;

    /// Finds an image by name or id.
    async fn image_get(&self, named: &str) -> Result<Image, HostError>;

    /// The sizes of an image's layers and what uses them. Measuring takes a while.
    async fn image_usage(&self, named: &str) -> Result<ImageUsage, HostError>;

    /// Creates an image. The build continues when the stream is dropped.
    async fn image_make(&self, order: CreateImage) -> Result<ImageLines, HostError>;

    /// Creates an image from a tar archive, plain or compressed.
    async fn image_import(
        &self,
        order: ImportImage,
        archive: Archive,
    ) -> Result<ImageLines, HostError>;

    /// Removes an image. Garbage collection deletes its layers once nothing uses them.
    async fn image_delete(&self, named: &str) -> Result<(), HostError>;
}
