//! Images that sandboxes start from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ImageId, SandboxId, SnapshotId, Timestamp};

/// `POST /v1/images`: builds, imports or pulls an image. Responds with JSON lines of [`ImageLine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateImage {
    /// Source of the image.
    pub from: ImageSource,
    /// Name of the image. Required for a folder; a pulled image takes the last part of its
    /// reference by default; a recipe has its own name.
    pub name: Option<String>,
    /// Run every step of the recipe again, ignoring cached layers.
    #[serde(default)]
    pub force: bool,
    /// UNSAFE: the steps of the recipe use the machine's own network, instead of a door for package
    /// registries and the names in the recipe.
    #[serde(default)]
    pub host_network: bool,
    /// Maximum unpacked size of one layer; 64 GiB when absent.
    pub max_bytes: Option<u64>,
}

/// Source of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ImageSource {
    /// Name of a recipe that is part of Harvest.
    Recipe(String),
    /// Path of a recipe file on the server's machine.
    File(String),
    /// Text of a recipe; files it refers to are not included.
    Text(String),
    /// Reference of an image in a registry; pulled with the registry logins of the server's user.
    Pull(String),
    /// Path of a folder with a root file system on the server's machine.
    Folder(String),
}

/// One line of the response to `POST /v1/images`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ImageLine {
    /// Another request is building this image; this one waits for the result.
    Waiting {
        /// Name of the image.
        image: String,
    },
    /// A step started.
    StepStarted {
        /// Number of the step; 1 is the base.
        index: usize,
        /// Number of steps.
        total: usize,
        /// The step, for people.
        what: String,
    },
    /// A step's layer was found in the cache.
    StepCached {
        /// Number of the step.
        index: usize,
        /// Number of steps.
        total: usize,
        /// The step, for people.
        what: String,
    },
    /// Progress of a download or import.
    Bytes {
        /// Bytes so far.
        done: u64,
        /// Total bytes, if known.
        total: Option<u64>,
    },
    /// Output of a step.
    Output {
        /// One line of output.
        line: String,
    },
    /// A step ended.
    StepDone {
        /// Number of the step.
        index: usize,
        /// Duration of the step.
        millis: u64,
    },
    /// The image is ready. Last line.
    Made {
        /// The new image.
        image: Image,
    },
    /// The build failed; an existing image of that name is unchanged. Last line.
    Failed {
        /// Error code for programs.
        code: String,
        /// Error message for people.
        message: String,
        /// Suggested next step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

/// An image: a stack of layers and defaults for commands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Image {
    /// Id of this build of the image.
    pub id: ImageId,
    /// Name of the image.
    pub name: String,
    /// Layers, bottom first.
    pub layers: Vec<String>,
    /// Defaults for commands.
    pub config: ImageConfig,
    /// Hash of the recipe the image was built from; differs from the recipe's when that has
    /// changed.
    pub recipe_key: String,
    /// Size of the layers on the disk.
    pub bytes: u64,
    /// Time of the build.
    pub created_at: Timestamp,
    /// Source of the image, for people.
    pub source: String,
}

/// How [`Image::source`] begins for an image of a recipe that is part of Harvest.
pub const BUILT_IN_RECIPE: &str = "built-in recipe";

impl Image {
    /// Whether the image was built from a recipe that is part of Harvest.
    #[must_use]
    pub fn is_built_in(&self) -> bool {
        self.source.starts_with(BUILT_IN_RECIPE)
    }
}

/// Defaults for commands in sandboxes started from an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageConfig {
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// User: `root`, `harvest` or a uid.
    pub user: String,
    /// Working folder: an absolute path in the sandbox.
    pub workdir: String,
    /// Agents that the image contains, with their versions.
    #[serde(default)]
    pub agents: BTreeMap<String, String>,
}

/// `GET /v1/images/{name}/usage`: size and users of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageUsage {
    /// The layers, bottom first.
    pub layers: Vec<ImageLayer>,
    /// Other users of its layers. These layers stay when the image is removed.
    pub used_by: ImageUsers,
}

/// A layer of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageLayer {
    /// Id of the layer.
    pub id: String,
    /// Size on the disk.
    pub bytes: u64,
}

/// Other users of an image's layers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageUsers {
    /// Names of images.
    pub images: Vec<String>,
    /// Sandboxes of this home.
    pub sandboxes: Vec<SandboxId>,
    /// Snapshots of this home.
    pub snapshots: Vec<SnapshotId>,
}
