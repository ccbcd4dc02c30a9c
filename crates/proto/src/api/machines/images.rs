//! Images: what sandboxes start from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ImageId, SandboxId, SnapshotId, Timestamp};

/// `POST /v1/images`. The answer is JSON lines of [`ImageLine`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MakeImage {
    /// What it is made from.
    pub from: ImageOrigin,
    /// What to call it: needed for a folder; a pulled one keeps the last part of its own name; a recipe has
    /// its own.
    #[serde(default)]
    pub name: Option<String>,
    /// Make every step of a recipe again.
    #[serde(default)]
    pub force: bool,
    /// The most one layer may become unpacked; 64 GiB when absent.
    #[serde(default)]
    pub max_bytes: Option<u64>,
}

/// What an image is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ImageOrigin {
    /// A recipe that comes along, by its name.
    Recipe(String),
    /// A recipe in a file of the server's machine.
    File(String),
    /// A recipe's own text; files it names are not sent along.
    Text(String),
    /// An image in a registry; logins are those of the server's user.
    Pull(String),
    /// A folder of the server's machine with a root file system.
    Folder(String),
}

/// One line of the answer to whoever makes an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ImageLine {
    /// Somebody else makes this image; their result is waited for.
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
    /// Done; nothing follows.
    Made {
        /// The image.
        image: Image,
    },
    /// It failed, and the image of that name stays as it was; nothing follows.
    Failed {
        /// A word that programs may compare.
        code: String,
        /// What happened.
        message: String,
        /// What to do next.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

/// A stack of layers with its config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Image {
    /// Names this build of it.
    pub id: ImageId,
    /// What people call it.
    pub name: String,
    /// What it consists of, bottom first.
    pub layers: Vec<String>,
    /// What commands get.
    pub config: ImageConfig,
    /// Equal to the recipe's key as long as the recipe has not changed.
    pub recipe_key: String,
    /// What its layers take on the disk.
    pub bytes: u64,
    /// When it was made.
    pub created_at: Timestamp,
    /// What it was made from, in words.
    pub source: String,
}

/// What commands get unless they say otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageConfig {
    /// Variables.
    pub env: BTreeMap<String, String>,
    /// `root`, `harvest` or a number.
    pub user: String,
    /// An absolute path inside.
    pub workdir: String,
}

/// `GET /v1/images/{name}/usage`: what an image takes, and who stands on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageUsage {
    /// Each layer, bottom first.
    pub layers: Vec<ImageLayer>,
    /// Who else stands on its layers; these stay when the image is removed.
    pub used_by: ImageUsers,
}

/// A layer and what it takes on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageLayer {
    /// Which.
    pub id: String,
    /// How much.
    pub bytes: u64,
}

/// Who stands on an image's layers besides the image itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageUsers {
    /// Other images.
    pub images: Vec<String>,
    /// Sandboxes of this home.
    pub sandboxes: Vec<SandboxId>,
    /// Snapshots of this home.
    pub snapshots: Vec<SnapshotId>,
}
