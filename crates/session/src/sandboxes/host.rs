//! Images, volumes and disks of the machine on which a provider runs sandboxes.

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use harvest_proto::{
    RepositoryName,
    api::{
        CreateImage, CreateVolume, DiskUsage, Finding, GarbageReport, Image, ImageLine, ImageUsage,
        Volume,
    },
};

use super::SandboxError;

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
    async fn image_list(&self) -> Result<Vec<Image>, SandboxError>;

    /// Finds an image by name or id.
    async fn image_get(&self, named: &str) -> Result<Image, SandboxError>;

    /// The sizes of an image's layers and what uses them. Measuring takes a while.
    async fn image_usage(&self, named: &str) -> Result<ImageUsage, SandboxError>;

    /// Creates an image. The build continues when the stream is dropped.
    async fn image_make(&self, order: CreateImage) -> Result<ImageLines, SandboxError>;

    /// Creates an image from a tar archive, plain or compressed.
    async fn image_import(
        &self,
        order: ImportImage,
        archive: Archive,
    ) -> Result<ImageLines, SandboxError>;

    /// Removes an image. Garbage collection deletes its layers once nothing uses them.
    async fn image_delete(&self, named: &str) -> Result<(), SandboxError>;
}

/// Manages images and volumes, measures disks and checks the machine.
#[async_trait]
pub trait Host: Images {
    /// Lists every volume by name.
    async fn volume_list(&self) -> Result<Vec<Volume>, SandboxError>;

    /// Creates a volume; its space is allocated at once.
    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, SandboxError>;

    /// Deletes a volume with its content.
    async fn volume_delete(&self, name: &str) -> Result<(), SandboxError>;

    /// Deletes the state volume (`/mnt/state`) of a repository. Idempotent.
    async fn state_delete(&self, repository: &RepositoryName) -> Result<(), SandboxError>;

    /// Measures disk usage, which takes a while the first time.
    async fn disk_usage(&self) -> Result<DiskUsage, SandboxError>;

    /// Collects garbage; with `dry_run` it only reports it.
    async fn collect(&self, dry_run: bool) -> Result<GarbageReport, SandboxError>;

    /// Checks what the machine supports, by trying it.
    async fn findings(&self) -> Result<Vec<Finding>, SandboxError>;

    /// Counts of standby processes; `None` when there are none or the zygote does not answer.
    async fn standby(&self) -> Option<StandbyCounts>;
}

/// Counts of preforked standby processes since the zygote started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandbyCounts {
    /// Standby processes available now.
    pub ready: u64,
    pub preforked: u64,
    /// Starts that used a standby process.
    pub used: u64,
    /// Starts that found none available.
    pub missed: u64,
}
