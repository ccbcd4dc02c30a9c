//! Images, as a host makes and keeps them.

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use harvest_proto::api::machines::{Image, ImageLine, ImageUsage, MakeImage};

use super::MachineError;

/// How making an image comes along; the last line is `made` or `failed`.
pub type ImageLines = BoxStream<'static, ImageLine>;

/// A tar as it comes; an error means that it broke off.
pub type Archive = BoxStream<'static, std::io::Result<Vec<u8>>>;

/// An image to be made of a tar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportImage {
    /// What to call it.
    pub name: String,
    /// Where the tar comes from, in words.
    pub source: Option<String>,
    /// The most it may become unpacked.
    pub max_bytes: Option<u64>,
}

/// Makes, finds and forgets images.
#[async_trait]
pub trait Images: Send + Sync {
    /// Every image, by name.
    async fn image_list(&self) -> Result<Vec<Image>, MachineError>;

    /// One of them, by name or id. Cheap.
    async fn image_get(&self, named: &str) -> Result<Image, MachineError>;

    /// What its layers take and who stands on them. Measures, which takes a while.
    async fn image_usage(&self, named: &str) -> Result<ImageUsage, MachineError>;

    /// Makes one. What was begun is finished also when nobody reads the lines.
    async fn image_make(&self, order: MakeImage) -> Result<ImageLines, MachineError>;

    /// Makes one of a tar, plain or compressed.
    async fn image_import(
        &self,
        order: ImportImage,
        archive: Archive,
    ) -> Result<ImageLines, MachineError>;

    /// Forgets one; its layers go with the next collection, if nothing uses them.
    async fn image_delete(&self, named: &str) -> Result<(), MachineError>;
}
