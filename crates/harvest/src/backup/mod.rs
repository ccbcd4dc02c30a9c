//! Backups: one compressed tar with a home's database, keys, forge, artifacts, snapshots and the
//! layers they need. `create` reads a home that may be in use; `load` makes a new one. Volumes,
//! standalone sandboxes and logs are in no backup.

pub(crate) mod create;
mod draft;
mod layout;
pub(crate) mod load;

use harvest_proto::Timestamp;
use serde::{Deserialize, Serialize};

/// The version of the archive's layout.
const FORMAT: u32 = 1;

/// The first member: what the archive is.
const ABOUT: &str = "backup.json";

/// The folder with the layers of the home.
const LAYERS: &str = "layers";

/// The folder with the records of snapshots.
const SNAPSHOTS: &str = "snapshots";

/// The folder of the archive with the layers of images, which belong to the cache.
const IMAGE_LAYERS: &str = "image-layers";

/// Files of a home that are copied as they are. The tokens of `token` and the key of `vault.key`
/// are secrets.
const FILES: [&str; 3] = ["vault.key", "token", "sessions-of.json"];

/// Folders of a home that are copied as they are.
const FOLDERS: [&str; 2] = ["artifacts", "forge"];

/// The settings that the backup was made with, in the loaded home. No command reads them there.
const SETTINGS: &str = "harvest.toml";

/// The description of a backup, its first member.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) format: u32,
    /// The version of the program that made the backup.
    pub(crate) version: String,
    /// The version of the database's tables: a program with another one cannot load the backup.
    pub(crate) schema: i64,
    pub(crate) created_at: Timestamp,
    /// The home that was saved.
    pub(crate) home: String,
    pub(crate) snapshots: usize,
    /// Layers of images and of the home.
    pub(crate) layers: usize,
}
